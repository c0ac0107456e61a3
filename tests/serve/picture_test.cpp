// Pictures in chat completions.
#include <gtest/gtest.h>

#include "godwit/base/file.h"
#include "tests/serve/client.h"
#include "tests/serve/server.h"

namespace godwit::serve {
namespace {

using testing::random_model;
using testing::request;
using testing::seeing_model;
using testing::Server;

std::string base64(const std::string& bytes) {
  constexpr const char* kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : bytes) {
    bits = bits << 8 | static_cast<unsigned char>(c);
    for (count += 8; count >= 6; count -= 6) out += kLetters[bits >> (count - 6) & 63];
  }
  if (count > 0) out += kLetters[bits << (6 - count) & 63];
  while (out.size() % 4 != 0) out += '=';
  return out;
}

std::string data_url(const std::string& name) {
  return "data:image/png;base64," + base64(read_file(GODWIT_FIXTURES "/images/" + name));
}

testing::Response ask(const Server& server, const std::vector<std::string>& urls, bool logprobs = false) {
  Json content = Json::array({{{"type", "text"}, {"text", "What is this?"}}});
  for (const std::string& url : urls)
    content.push_back({{"type", "image_url"}, {"image_url", {{"url", url}}}});
  const Json body = {{"messages", Json::array({{{"role", "user"}, {"content", content}}})},
                     {"max_tokens", 4},
                     {"seed", 1},
                     {"logprobs", logprobs},
                     {"thinking", false}};
  return request(server.port(), "POST", "/v1/chat/completions", to_text(body));
}

TEST(Pictures, AreTakenAndSeen) {
  Server server(seeing_model(), {.model_name = "tiny", .image_directory = GODWIT_FIXTURES "/images"});
  EXPECT_EQ(Json::parse(request(server.port(), "GET", "/v1/models").body)["data"][0]["vision"], true);
  const auto blind = ask(server, {});
  ASSERT_EQ(blind.status, 200) << blind.body;
  const auto seen = ask(server, {data_url("rgb.png")}, /*logprobs=*/true);
  ASSERT_EQ(seen.status, 200) << seen.body;
  const Json answer = Json::parse(seen.body);
  EXPECT_GT(answer["usage"]["prompt_tokens"], Json::parse(blind.body)["usage"]["prompt_tokens"]);
  // The same picture by its name is the same prompt; another one of another look is not.
  const auto file = ask(server, {"file:rgb.png"}, /*logprobs=*/true);
  ASSERT_EQ(file.status, 200) << file.body;
  EXPECT_EQ(Json::parse(file.body)["choices"], answer["choices"]);
  for (const std::string name : {"gray.png", "rgb_420.jpg", "lossy.webp"})
    EXPECT_EQ(ask(server, {data_url(name), data_url("rgb.png")}).status, 200) << name;
}

TEST(Pictures, WhatIsWrongWithThemIsSaid) {
  const auto refusal = [](const Server& server, const std::string& url, const char* named) {
    const auto r = ask(server, {url});
    EXPECT_EQ(r.status, 400) << r.body;
    const auto message = Json::parse(r.body)["error"]["message"].get<std::string>();
    EXPECT_NE(message.find(named), std::string::npos) << message;
    EXPECT_NE(message.find("messages[0].content[1]"), std::string::npos) << message;
  };
  {
    Server server(seeing_model());
    refusal(server, "https://127.0.0.1/x.png", "fetches nothing");
    refusal(server, "file:rgb.png", "reads no files");
    refusal(server, "data:image/png;base64,!!!", "base64");
    refusal(server, "data:image/png;base64,", "");
    refusal(server, "data:image/png;base64," + base64("no picture"), "");
    const std::string whole = read_file(GODWIT_FIXTURES "/images/rgb.png");
    refusal(server, "data:image/png;base64," + base64(whole.substr(0, whole.size() / 2)), "");
    EXPECT_EQ(ask(server, {data_url("rgb.png")}).status, 200);
    // More pictures than the context holds.
    EXPECT_EQ(ask(server, std::vector<std::string>(600, data_url("rgb.png"))).status, 400);
  }
  Server blind(random_model());
  const auto r = ask(blind, {data_url("rgb.png")});
  EXPECT_EQ(r.status, 400);
  EXPECT_NE(r.body.find("takes no images"), std::string::npos) << r.body;
}

}  // namespace
}  // namespace godwit::serve
