// `godwit plan`: what a model costs, from its configuration alone.
#include "godwit/plan/plan.h"

#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/plan/cluster.h"

namespace godwit::cli {
namespace {

using nlohmann::json;

json model_json(const PlanArgs& args, const Plan& plan) {
  const ParameterCount& p = plan.parameters;
  const DecodeBytes& d = plan.decode_bytes;
  return {{"model", args.model},
          {"context", plan.context},
          {"parameters",
           {{"total", p.total},
            {"vision", p.vision},
            {"active", p.active},
            {"active_without_head", p.active_without_head},
            {"by_module", p.by_module},
            {"active_by_module", p.active_by_module}}},
          {"state",
           {{"kda_fp32_bytes", plan.state.kda_fp32},
            {"conv_bytes", plan.state.conv},
            {"mla_bf16_bytes_per_token", plan.state.mla_bf16_per_token},
            {"bytes_at_context", plan.state.at(plan.context)}}},
          {"flops_per_token",
           {{"train", plan.flops.train}, {"prefill", plan.flops.prefill}, {"decode", plan.flops.decode}}},
          {"decode_bytes_per_token",
           {{"batch", plan.decode_batch},
            {"routed_experts", d.routed_experts},
            {"other_weights", d.other_weights},
            {"kda_state", d.kda_state},
            {"conv_state", d.conv_state},
            {"mla_cache", d.mla_cache},
            {"total", d.total()}}},
          {"checkpoint_bytes", plan.checkpoint_bytes},
          {"checkpoint_bytes_by_dtype", plan.checkpoint_bytes_by_dtype}};
}

void add_cluster_json(json& out, const PlanArgs& args, const ClusterPlan& c) {
  const GpuMemory& m = c.memory;
  out["gpus"] = args.gpus;
  out["layout"] = {{"tp", c.layout.tp},
                   {"pp", c.layout.pp},
                   {"cp", c.layout.cp},
                   {"ep", c.layout.ep},
                   {"dp", c.layout.dp}};
  out["batch_tokens"] = c.batch_tokens;
  out["micro_batches"] = c.micro_batches;
  out["pipeline_bubble"] = c.bubble;
  out["memory_per_gpu"] = {{"weights", m.weights},     {"gradients", m.gradients},
                           {"optimizer", m.optimizer}, {"activations", m.activations},
                           {"workspace", m.workspace}, {"system", m.system},
                           {"total", m.total()}};
  double sum = 0;
  for (size_t i = 0; i < kTrafficNames.size(); ++i) {
    out["communication_per_step"][kTrafficNames[i]] = c.sent_bytes[i];
    out["communication_seconds"][kTrafficNames[i]] = c.sent_seconds[i];
    sum += c.sent_bytes[i];
  }
  out["communication_per_step"]["total"] = sum;
  out["communication_seconds"]["total"] = c.communication_s();
  out["mfu"] = args.mfu;
  out["step_flops"] = c.step_flops;
  out["step_time_s"] = c.step_time_s;
  out["communication_bound"] = c.communication_bound;
  if (args.tokens <= 0) return;
  out["tokens"] = args.tokens;
  out["steps"] = c.steps;
  out["training_time_s"] = c.seconds;
  out["gpu_hours"] = c.gpu_hours;
  out["cost"] = c.cost;
}

std::string flop(double n) {
  const char* const units[] = {"", "K", "M", "G", "T", "P", "E", "Z", "Y"};
  int unit = 0;
  while (n >= 1000 && unit < 8) n /= 1000, ++unit;
  return fmt::format("{:.2f} {}FLOP", n, units[unit]);
}

std::string duration(double s) {
  if (s < 1) return fmt::format("{:.1f} ms", s * 1e3);
  if (s < 600) return fmt::format("{:.1f} s", s);
  return s < 172800 ? fmt::format("{:.1f} hours", s / 3600) : fmt::format("{:.1f} days", s / 86400);
}

void line(const std::string& name, const std::string& value, const std::string& note = "") {
  print_out("  {:<26}{:>14}{}{}\n", name, value, note.empty() ? "" : "   ", note);
}

void print_model(const PlanArgs& args, const Plan& plan) {
  const ParameterCount& p = plan.parameters;
  const auto share = [](int64_t part, int64_t all) {
    return all > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(all) : 0.0;
  };
  print_out("{}\n\n  {:<20}{:>20}{:>9}{:>20}{:>9}\n", args.model, "parameters", "all", "share",
            "active a token", "share");
  for (const auto& [module, count] : p.by_module) {
    const auto found = p.active_by_module.find(module);
    const int64_t active = found == p.active_by_module.end() ? 0 : found->second;
    print_out("  {:<20}{:>20}{:>7.2f} %{:>20}{:>7.2f} %\n", module, count, share(count, p.total), active,
              share(active, p.active));
  }
  print_out("  {:<20}{:>20}{:>9}{:>20}\n\n", "sum", p.total, "", p.active);
  line("total", human_count(static_cast<double>(p.total)));
  line("active a token", human_count(static_cast<double>(p.active)),
       human_count(static_cast<double>(p.active_without_head)) + " without the head");
  std::string dtypes;
  for (const auto& [dtype, bytes] : plan.checkpoint_bytes_by_dtype)
    dtypes +=
        fmt::format("{}{} {}", dtypes.empty() ? "" : ", ", dtype, human_bytes(static_cast<double>(bytes)));
  line("checkpoint", human_bytes(static_cast<double>(plan.checkpoint_bytes)),
       fmt::format("{} bytes: {}", plan.checkpoint_bytes, dtypes));
  line("KDA state a sequence", human_bytes(static_cast<double>(plan.state.kda_fp32)),
       fmt::format("fp32, at any length; and {} of convolution tails",
                   human_bytes(static_cast<double>(plan.state.conv))));
  line("MLA cache a token", fmt::format("{} B", plan.state.mla_bf16_per_token),
       fmt::format("bf16; with the state {} at {} tokens",
                   human_bytes(static_cast<double>(plan.state.at(plan.context))), plan.context));
  line("training a token", flop(plan.flops.train),
       fmt::format("forward and backward, context {}", plan.context));
  line("prefill a token", flop(plan.flops.prefill), fmt::format("mean over a prompt of {}", plan.context));
  line("decode a token", flop(plan.flops.decode), fmt::format("after {} cached tokens", plan.context));
  const DecodeBytes& d = plan.decode_bytes;
  line("bytes a decoded token", human_bytes(d.total()),
       fmt::format("at batch {}: experts {}, other weights {}, KDA state {}, MLA cache {}", plan.decode_batch,
                   human_bytes(d.routed_experts), human_bytes(d.other_weights),
                   human_bytes(d.kda_state + d.conv_state), human_bytes(d.mla_cache)));
  line("", duration(d.total() / (args.gpu_bandwidth_tb * 1e12)),
       fmt::format("a token at least, from one memory of {} TB/s", args.gpu_bandwidth_tb));
}

void print_cluster(const PlanArgs& args, const ClusterPlan& c) {
  print_out("\nTraining on {} GPUs of {} GiB: {}\n\n", args.gpus, args.gpu_memory_gib, c.layout.text());
  const GpuMemory& m = c.memory;
  line("memory a GPU", human_bytes(m.total()),
       c.layout.pp > 1 ? fmt::format("the fullest, in pipeline stage {}", c.fullest_stage) : "");
  for (const auto& [name, bytes] : {std::pair{"  weights", m.weights},
                                    {"  gradients", m.gradients},
                                    {"  optimizer", m.optimizer},
                                    {"  activations", m.activations},
                                    {"  workspace", m.workspace},
                                    {"  system", m.system}})
    line(name, human_bytes(bytes));
  line("batch", fmt::format("{}", c.batch_tokens),
       fmt::format("tokens a step: {} micro-batches of {} for each of {} data ranks", c.micro_batches,
                   args.context, c.layout.dp));
  double sum = 0;
  for (const double bytes : c.sent_bytes) sum += bytes;
  line("sent by a GPU a step", human_bytes(sum), duration(c.communication_s()) + " if nothing hides it");
  for (size_t i = 0; i < kTrafficNames.size(); ++i)
    if (c.sent_bytes[i] > 0)
      line(fmt::format("  {}", kTrafficNames[i]), human_bytes(c.sent_bytes[i]), duration(c.sent_seconds[i]));
  if (c.layout.pp > 1) line("pipeline bubble", fmt::format("{:.1f} %", 100 * c.bubble));
  line("step", duration(c.step_time_s),
       c.communication_bound
           ? fmt::format("bound by communication: {} at an MFU of {}", flop(c.step_flops), args.mfu)
           : fmt::format("{} at an MFU of {}", flop(c.step_flops), args.mfu));
  line("tokens/s", fmt::format("{:.0f}", static_cast<double>(c.batch_tokens) / c.step_time_s));
  if (args.tokens <= 0) return;
  line(fmt::format("{} tokens", human_count(static_cast<double>(args.tokens))), duration(c.seconds),
       fmt::format("{} steps, {:.4g} GPU-hours, {:.4g} at {} a GPU-hour", c.steps, c.gpu_hours, c.cost,
                   args.price));
}

ClusterOptions cluster_options(const PlanArgs& args) {
  ClusterOptions o;
  o.gpus = args.gpus;
  o.tp = args.tp, o.pp = args.pp, o.cp = args.cp, o.ep = args.ep, o.dp = args.dp;
  o.context = args.context;
  o.batch_tokens = args.batch_tokens;
  o.recompute = !args.no_recompute;
  o.tokens = args.tokens;
  o.mfu = args.mfu;
  o.price = args.price;
  o.gpu = {.memory_bytes = args.gpu_memory_gib * (1 << 30),
           .bandwidth = args.gpu_bandwidth_tb * 1e12,
           .flops = args.gpu_tflops * 1e12,
           .link = args.link_gb * 1e9,
           .network = args.network_gb * 1e9,
           .per_host = args.gpus_per_host};
  return o;
}

}  // namespace

int run_plan(const PlanArgs& args) {
  const bool axes = args.tp || args.pp || args.cp || args.ep || args.dp;
  check(args.gpus > 0 || !axes, "--tp, --pp, --cp, --ep and --dp need --gpus");
  const ModelConfig config = load_model_config(args.model);
  const Plan plan = make_plan(config, args.context, args.batch);
  json out = model_json(args, plan);
  const double training = plan.flops.train * static_cast<double>(args.tokens);
  if (args.gpus > 0) {
    ClusterPlan cluster;
    try {
      cluster = plan_cluster(config, cluster_options(args));
    } catch (const Error& e) {
      fail("plan {} on {} GPUs: {}", args.model, args.gpus, e.what());
    }
    if (!args.json) {
      print_model(args, plan);
      print_cluster(args, cluster);
      return 0;
    }
    add_cluster_json(out, args, cluster);
  }
  if (args.tokens > 0) out["training_flops"] = training;
  if (args.json) {
    print_json(out);
    return 0;
  }
  print_model(args, plan);
  if (args.tokens > 0) line(human_count(static_cast<double>(args.tokens)) + " tokens", flop(training));
  return 0;
}

}  // namespace godwit::cli
