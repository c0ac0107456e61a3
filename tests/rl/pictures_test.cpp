// Episodes with pictures: read by the rollout, replayed bit for bit, and trained on through the tower.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <span>

#include "godwit/io/base64.h"
#include "godwit/io/image.h"
#include "godwit/model/media.h"
#include "godwit/rl/demonstrate.h"
#include "godwit/rl/policy_step.h"
#include "godwit/rl/rollout.h"
#include "tests/rl/tiny_policy.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

TEST(Reading, ThePictureHasTheAnswerAndTheTextDoesNot) {
  auto environment = make_environment("reading", {{"digits", 3}, {"attempts", 2}});
  const Task task = environment->reset(4), same = environment->reset(4), other = environment->reset(5);
  const auto& parts = task.messages.at(0).content;
  ASSERT_EQ(parts.size(), 2u);
  ASSERT_TRUE(parts[0].is_image);
  EXPECT_EQ(parts[0].image_url, same.messages.at(0).content[0].image_url);
  EXPECT_NE(parts[0].image_url, other.messages.at(0).content[0].image_url);
  EXPECT_EQ(parts[1].text, other.messages.at(0).content[1].text);
  const std::string file = *io::decode_data_url(parts[0].image_url, "here");
  const io::Image image = io::decode_image(std::as_bytes(std::span(file)), "here");
  EXPECT_EQ(image.width, 84);
  EXPECT_EQ(image.height, 28);

  environment->reset(4);
  StepResult r = environment->step(assistant_says("none"));
  EXPECT_FALSE(r.done);
  r = environment->step(*environment->demonstrate());
  EXPECT_TRUE(r.done);
  EXPECT_EQ(r.success, 1);
  environment->reset(4);
  environment->step(assistant_says("none"));
  EXPECT_EQ(environment->step(assistant_says("none")).success, 0);
  EXPECT_EQ(demonstrate(*make_environment("reading", json::object()), 1).success, 1);
}

LoadedModel seeing_policy() {
  Tokenizer tokenizer = test::byte_tokenizer();
  LoadedModel model = test::tiny_policy(3);
  model.config.media_id = tokenizer.special_id("<|media_pad|>");
  model.config.vision = VisionConfig{.patch_size = 14,
                                     .pos_emb_height = 2,
                                     .pos_emb_width = 4,
                                     .pos_emb_time = 4,
                                     .layers = 1,
                                     .hidden = 16,
                                     .intermediate = 16,
                                     .heads = 2,
                                     .qkv_hidden = 16};
  validate(model.config, "seeing");
  ModelWeights with_tower = init_weights(model.config, 3, at::kCPU, at::kFloat);
  model.weights.vision = with_tower.vision;
  return model;
}

TEST(Pictures, AreReadReplayedAndTrainedOn) {
  LoadedModel model = seeing_policy();
  RolloutOptions o;
  o.environments = {{.name = "reading", .options = R"({"attempts": 3})"}};
  o.groups = 3;
  o.samples = 3;
  o.turn_tokens = 20;
  o.context = 300;
  o.finish_share = 0.6;
  Rollouts rollouts(model, o);
  auto groups = rollouts.run(0);
  EXPECT_GT(rollouts.suspended(), 0);
  // Suspended episodes come back with their pictures.
  Rollouts again(model, o);
  again.load(rollouts.save());
  auto rest = again.run(0);
  for (auto& group : rest) groups.push_back(std::move(group));
  std::vector<PolicySample> samples;
  size_t longest = 0;
  for (const auto& group : groups) {
    for (const Trajectory& t : group) {
      EXPECT_EQ(t.media.size(), 1u);
      EXPECT_EQ(t.pictures.size(), 1u);
      longest = std::max(longest, t.ids.size());
      samples.push_back({.trajectory = &t, .advantages = std::vector<double>(t.turns.size(), 1.0)});
    }
  }
  PolicyStep step(model, {});
  const PolicyStepResult r = step.backward(samples, 0);
  EXPECT_EQ(r.max_dlogp, 0);
  EXPECT_GT(r.present_tokens, 20);
  ASSERT_GT(longest, 128u);
  const auto gradients = [&] {
    std::map<std::string, at::Tensor> out;
    for_each_param(model.config, model.weights, [&](const ParamInfo& info, at::Tensor& value) {
      if (value.grad().defined()) out.emplace(info.name, value.grad().clone());
    });
    return out;
  };
  const auto whole = gradients();
  // The same a segment at a time, pictures and their tower included. fp32, rounded in another order.
  PolicyStepOptions in_segments;
  in_segments.segment_tokens = 64;
  PolicyStep cut(model, in_segments);
  EXPECT_EQ(cut.backward(samples, 0).max_dlogp, 0);
  const auto parts = gradients();
  double reached = 0;
  for (const auto& [name, grad] : whole) {
    const double size = grad.norm().item<double>();
    ASSERT_TRUE(parts.contains(name)) << name;
    EXPECT_LE((parts.at(name) - grad).norm().item<double>(), 1e-4 * size + 1e-9) << name;
    if (name.starts_with("vision_tower.")) reached += size;
  }
  EXPECT_GT(reached, 0);
}

}  // namespace
}  // namespace godwit::rl
