// What every answer has beyond its content: an id, the headers that let pages of other origins read it, and a
// place in the counts by path and status.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "godwit/serve/http.h"
#include "godwit/serve/metrics.h"

namespace godwit::serve {

using Headers = std::vector<std::pair<std::string, std::string>>;

// The value of a header, empty when it is not there. `name` in lower case.
std::string header_of(const HttpRequest& request, const std::string& name);

// Which pages may make the server work from a browser.
struct OriginRules {
  std::vector<std::string> allowed = {};  // "*": all
  // The server is reachable from this machine alone, and nothing but that protects it: a name that is not
  // this machine's, brought to its address (DNS rebinding), is no origin of ours.
  bool local_names_only = false;
};

// Whether the request comes from a page of another origin that is not allowed. Such a page cannot read the
// answer, but could have the work done. What is no browser sends no Origin.
bool is_foreign(const HttpRequest& request, const OriginRules& rules);

// Headers for the page that asks; none if its origin is not allowed.
Headers origin_headers(const HttpRequest& request, const std::vector<std::string>& allowed);
// What a page that may ask may send, as the answer to OPTIONS.
Headers preflight_headers(const HttpRequest& request, const std::vector<std::string>& allowed);

class OuterReply final : public HttpReply {
 public:
  // `path` is the label in the counts.
  OuterReply(std::shared_ptr<HttpReply> inner, Headers headers, std::string path, Metrics& metrics)
      : inner_(std::move(inner)), headers_(std::move(headers)), path_(std::move(path)), metrics_(metrics) {}

  void send(HttpResponse response) override { inner_->send(with_headers(std::move(response))); }
  void begin(HttpResponse head) override { inner_->begin(with_headers(std::move(head))); }
  bool write(std::string_view data) override { return inner_->write(data); }
  void end() override { inner_->end(); }
  void on_gone(std::function<void()> callback) override { inner_->on_gone(std::move(callback)); }
  bool gone() override { return inner_->gone(); }

 private:
  HttpResponse with_headers(HttpResponse response) {
    metrics_.answers.add(path_, response.status);
    response.headers.insert(response.headers.end(), headers_.begin(), headers_.end());
    return response;
  }

  std::shared_ptr<HttpReply> inner_;
  Headers headers_;
  std::string path_;
  Metrics& metrics_;
};

}  // namespace godwit::serve
