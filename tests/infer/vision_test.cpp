// Pictures through the engine: the same as the model at once, whatever the pieces and the cache.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "godwit/base/file.h"
#include "godwit/infer/generate.h"
#include "godwit/model/forward.h"
#include "godwit/ops/ops.h"
#include "tests/infer/bigram.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

LoadedModel seeing_model() {
  LoadedModel model = test::bigram_model({});
  model.config.media_id = model.tokenizer.special_id(kMediaPad);
  model.config.vision = VisionConfig{.patch_size = 14,
                                     .pos_emb_height = 4,
                                     .pos_emb_width = 4,
                                     .layers = 2,
                                     .hidden = 16,
                                     .intermediate = 24,
                                     .heads = 2,
                                     .qkv_hidden = 16};
  model.weights = init_weights(model.config, 5, at::kCPU, at::kFloat);
  return model;
}

std::string picture_file(const std::string& name) {
  return read_file(GODWIT_FIXTURES "/images/" + name);
}

ChatMessage user(std::vector<ChatPart> parts) {
  ChatMessage out;
  out.content = std::move(parts);
  return out;
}
ChatPart text(const std::string& t) {
  return {.text = t};
}
ChatPart image(const std::string& file) {
  return {.is_image = true, .image_url = file};
}

// A chat with pictures as the server makes it.
Request chat_request(const LoadedModel& model, std::vector<ChatMessage> messages) {
  Request request;
  request.media = read_images(model, messages,
                              [](const std::string& url, const std::string&) { return picture_file(url); });
  request.prompt = encode_chat(render_chat(messages, {}), model.tokenizer).ids;
  request.sampling = {.temperature = 0};
  request.max_tokens = 3;
  return request;
}

// The first token and its log-probability, by the whole prompt at once.
std::pair<int64_t, double> first_token(const LoadedModel& model, const Request& request) {
  const at::NoGradGuard no_grad;
  const PackedBatch batch{
      .ids = at::tensor(std::vector<int64_t>(request.prompt.begin(), request.prompt.end()), at::kLong),
      .cu_seqlens = make_cu_seqlens({static_cast<int64_t>(request.prompt.size())}),
      .media = vision_forward(model.config, *model.weights.vision,
                              vision_input(*model.config.vision, request.media))};
  const at::Tensor logits = forward_logits(model.config, model.weights, batch)[-1];
  const at::Tensor allowed = logits.masked_fill(forbidden_tokens(model, {}), -INFINITY);
  const int64_t id = allowed.argmax().item<int64_t>();
  return {id, logits.log_softmax(0)[id].item<double>()};
}

const std::vector<ChatMessage> kChat = {
    user({text("What is this?"), image("rgb.png"), text("and that"), image("rgb_420.jpg")}),
    user({image("lossy.webp"), image("rgba.png"), text("Compare.")})};

TEST(EngineVision, TheSameAsTheModelAtOnce) {
  const LoadedModel model = seeing_model();
  const Request request = chat_request(model, kChat);
  const auto [id, logprob] = first_token(model, request);
  for (const int64_t prefill : {64, 4096}) {
    Engine engine(model, {.max_sequences = 2, .prefill_tokens = prefill});
    const Generation out = generate(engine, request);
    EXPECT_EQ(out.ids.at(0), id);
    EXPECT_NEAR(out.logprobs.at(0), logprob, 1e-4);
    const Generation again = generate(engine, request);  // from the prefix cache
    EXPECT_EQ(again.ids, out.ids);
    EXPECT_EQ(again.logprobs, out.logprobs);
    EXPECT_GT(again.finish.cached_tokens, 0);
  }
}

TEST(EngineVision, AnotherPictureOfTheSameSizeIsNotTakenFromTheCache) {
  const LoadedModel model = seeing_model();
  std::vector<ChatMessage> before = {user({image("rgb.png"), text(std::string(600, 'x'))})}, after = before;
  Request first = chat_request(model, before), second = first;
  auto other = std::make_shared<MediaItem>(*first.media[0]);
  for (float& value : other->patches) value = -value;
  other->hash ^= 1;
  second.media = {other};
  Engine engine(model, {.max_sequences = 1});
  const Generation a = generate(engine, first), b = generate(engine, second), c = generate(engine, first);
  EXPECT_EQ(b.finish.cached_tokens, 0);
  EXPECT_NE(a.logprobs, b.logprobs);
  EXPECT_GT(c.finish.cached_tokens, 0);
  EXPECT_EQ(a.logprobs, c.logprobs);
}

TEST(EngineVision, ManyTogetherWithTextAndChoices) {
  const LoadedModel model = seeing_model();
  const Request seeing = chat_request(model, kChat);
  Request plain{.prompt = {5, 6, 7, 8}, .sampling = {.temperature = 0}, .max_tokens = 3};
  const auto alone = [&](const Request& request) {
    Engine engine(model, {.max_sequences = 1});
    return generate(engine, request);
  };
  const Generation a = alone(seeing), b = alone(plain);
  Engine engine(model, {.max_sequences = 4, .prefill_tokens = 64});
  std::vector<std::vector<double>> got(3);
  const auto collect = [&](std::vector<double>& out) {
    return [&out](int64_t, const DrawnToken& token) {
      out.push_back(token.logprob);
      return true;
    };
  };
  Request first = seeing, second = plain, third = seeing;
  first.on_token = collect(got[0]);
  second.on_token = collect(got[1]);
  third.choices = 3;
  third.on_token = [&](int64_t choice, const DrawnToken& token) {
    if (choice == 2) got[2].push_back(token.logprob);
    return true;
  };
  engine.submit(first);
  engine.submit(second);
  engine.submit(third);
  engine.run_until_idle();
  EXPECT_EQ(got[0], a.logprobs);
  EXPECT_EQ(got[1], b.logprobs);
  EXPECT_EQ(got[2], a.logprobs);
}

TEST(EngineVision, RefusesWhatDoesNotFit) {
  const LoadedModel model = seeing_model();
  Engine engine(model, {.max_sequences = 1});
  Request request = chat_request(model, kChat);
  request.media.pop_back();
  testing::expect_error([&] { engine.submit(request); }, {"<|media_pad|>", "its 3 images stand for"});
  request.media.clear();
  testing::expect_error([&] { engine.submit(request); }, {"its 0 images stand for 0"});
  const LoadedModel blind = test::bigram_model({});
  std::vector<ChatMessage> messages = kChat;
  testing::expect_error([&] { chat_request(blind, messages); }, {"this model takes no images"});
  testing::expect_error([&] { read_image(model, "no picture", "messages[0].content[1]"); },
                        {"messages[0].content[1]", "not a JPEG, PNG or WebP image"});
}

}  // namespace
}  // namespace godwit
