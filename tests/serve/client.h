// A blocking HTTP client for tests: sends bytes as they are and reads what comes.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

namespace godwit::testing {

class Client {
 public:
  explicit Client(uint16_t port) {
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) close();
    const timeval limit{.tv_sec = 60, .tv_usec = 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  ~Client() { close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void send(const std::string& bytes) { (void)!::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  // Some bytes; empty at the end.
  std::string receive() {
    char buffer[1 << 16];
    const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
    return n > 0 ? std::string(buffer, static_cast<size_t>(n)) : std::string();
  }
  std::string receive_until(const std::string& mark) {
    std::string all;
    while (all.find(mark) == std::string::npos) {
      const std::string more = receive();
      if (more.empty()) break;
      all += more;
    }
    return all;
  }
  std::string receive_all() { return receive_until("\x01 never \x01"); }

 private:
  int fd_ = -1;
};

struct Response {
  int status = 0;
  std::string head;
  std::string body;
};

// One request on a connection of its own. Chunked bodies are put together.
inline Response request(uint16_t port, const std::string& method, const std::string& path,
                        const std::string& body = {}, const std::string& headers = {}) {
  Client client(port);
  client.send(method + " " + path + " HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: " +
              std::to_string(body.size()) + "\r\n" + headers + "\r\n" + body);
  const std::string all = client.receive_all();
  Response out;
  const size_t end = all.find("\r\n\r\n");
  if (end == std::string::npos) return out;
  out.head = all.substr(0, end);
  out.status = std::atoi(all.c_str() + 9);
  std::string rest = all.substr(end + 4);
  if (out.head.find("transfer-encoding: chunked") == std::string::npos) {
    out.body = rest;
    return out;
  }
  for (size_t at = 0; at < rest.size();) {
    const size_t size = std::strtoul(rest.c_str() + at, nullptr, 16);
    if (size == 0) break;
    at = rest.find("\r\n", at) + 2;
    out.body += rest.substr(at, size);
    at += size + 2;
  }
  return out;
}

}  // namespace godwit::testing
