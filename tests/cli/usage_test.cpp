// Exit codes and what a user sees first.
#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace godwit {
namespace {

using test::Outcome;
using test::run;

TEST(Usage, Version) {
  const Outcome o = run({"--version"});
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(o.out.rfind("godwit ", 0), 0u) << o.out;
  EXPECT_EQ(o.err, "");
}

TEST(Usage, HelpNamesTheCommands) {
  const Outcome o = run({"--help"});
  EXPECT_EQ(o.code, 0);
  for (const char* command : {"plan", "inspect", "logits", "tokenizer", "generate"})
    EXPECT_NE(o.out.find(command), std::string::npos) << command;
  const Outcome of_command = run({"generate", "--help"});
  EXPECT_EQ(of_command.code, 0);
  for (const char* option : {"--model", "--prompt", "--max-tokens", "--temperature", "--seed", "--json"})
    EXPECT_NE(of_command.out.find(option), std::string::npos) << option;
}

TEST(Usage, WrongUsageIsTwo) {
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{},
        {"nonsense"},
        {"plan"},
        {"plan", "nano", "--context", "many"},
        {"generate", "--model", "x"},
        {"tokenizer"},
        {"tokenizer", "nonsense"},
        {"nonsense", "--help"},
        {"generate", "--model", "x", "--prompt", "x", "--temperature", "nan"},
        {"generate", "--model", "x", "--prompt", "x", "--top-p", "nan"},
        {"plan", "nano", "--gpus", "8", "--mfu", "nan"},
        {"plan", "nano", "--gpus", "8", "--price", "nan"},
        {"data", "pack", "x", "--out", "y", "--holdout", "nan"},
        {"generate", "--model", "x", "--prompt", "x", "--threads", "100000"},
        {"generate", "--model", "x", "--prompt", "x", "--seed", "18446744073709551616"},
        {"generate", "--model", "x", "--prompt", "x", "--seed", "-1"},
        {"generate", "--model", "x", "--prompt", "x", "--seed", "010"},
        {"generate", "--model", "x", "--prompt", "x", "--max-tokens", "99999999999999999999"},
        {"chat", "--model", "x", "--top-k", "1e3"},
        {"serve", "--model", "x", "--max-sequences", "99999999999999999999"},
        {"serve", "--model", "x", "--max-waiting", "1.5"},
        {"serve", "--model", "x", "--port", "65536"},
        {"serve", "--model", "x", "--host-cache", "-1"},
        {"serve", "--model", "x", "--allow-origin", "foo"},
        {"serve", "--model", "x", "--shutdown-timeout", "-1"},
        {"logits", "--model", "x", "--dtype", "int8"}}) {
    const Outcome o = run(args);
    EXPECT_EQ(o.code, 2) << (args.empty() ? "no arguments" : args[0]);
    EXPECT_EQ(o.out, "");
    EXPECT_NE(o.err, "");
  }
}

TEST(Usage, WrongUsageSaysWhat) {
  EXPECT_NE(run({"nonsense"}).err.find("no command 'nonsense'"), std::string::npos);
  const Outcome o = run({"generate", "--model", "x", "--prompt", "x", "--max-tokens", "-1"});
  EXPECT_NE(o.err.find("--max-tokens: expected a whole number from 1 to 1000000000000, got -1"),
            std::string::npos)
      << o.err;
}

TEST(Usage, FailureIsOneLineAndOne) {
  const Outcome o = run({"plan", "no-such-model", "--json"});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.out, "");
  EXPECT_EQ(o.err_lines(), 1);
  EXPECT_EQ(o.err.rfind("godwit: ", 0), 0u) << o.err;
  for (const char* part : {"no-such-model", "kimi-k3", "nano"})
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
}

// Kimi K3 report (arXiv:2607.24653), table 1 and section 5: 2.78 T parameters, 104.2 B active.
TEST(Usage, PlanOfKimiK3) {
  const Outcome o = run({"plan", "kimi-k3", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const nlohmann::json plan = o.json();
  EXPECT_EQ(plan["parameters"]["total"], 2779931837184);
  EXPECT_EQ(plan["parameters"]["vision"], 401214464);
  EXPECT_EQ(plan["checkpoint_bytes"], 1560860324864);
  EXPECT_NEAR(plan["parameters"]["active"].get<double>(), 104.19e9, 0.01e9);
  EXPECT_NEAR(plan["parameters"]["active_without_head"].get<double>(), 103.02e9, 0.01e9);
  EXPECT_EQ(plan["state"]["kda_fp32_bytes"], int64_t{69} * 96 * 128 * 128 * 4);
  EXPECT_EQ(plan["state"]["mla_bf16_bytes_per_token"], 24 * 576 * 2);
  for (const char* key : {"train", "prefill", "decode"}) EXPECT_GT(plan["flops_per_token"][key], 2e11) << key;
  EXPECT_NE(run({"plan", "kimi-k3"}).out.find("2.78"), std::string::npos);
}

}  // namespace
}  // namespace godwit
