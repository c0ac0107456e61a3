#include "godwit/dist/launch.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/support/files.h"

namespace godwit::dist {
namespace {

Launch launch(const std::map<std::string, std::string>& variables) {
  return launch_from([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

const std::map<std::string, std::string> kTwo = {
    {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a.b"}, {"MASTER_PORT", "29500"}};

std::map<std::string, std::string> with(const std::string& name, const std::string& value) {
  std::map<std::string, std::string> out = kTwo;
  if (value.empty())
    out.erase(name);
  else
    out[name] = value;
  return out;
}

TEST(Launch, OneProcessWithoutVariables) {
  EXPECT_EQ(launch({}).size, 1);
  EXPECT_EQ(launch({{"WORLD_SIZE", "1"}, {"RANK", "0"}}).size, 1);
  EXPECT_EQ(launch({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "2"}}).size, 1);  // a shell inside an allocation
}

TEST(Launch, Torchrun) {
  const Launch plain = launch(kTwo);
  EXPECT_EQ(plain.rank, 1);
  EXPECT_EQ(plain.size, 2);
  EXPECT_EQ(plain.host, "a.b");
  EXPECT_EQ(plain.port, 29500);
  EXPECT_FALSE(plain.store_is_up);
  EXPECT_EQ(launch(with("LOCAL_RANK", "1")).local_rank, 1);
  EXPECT_TRUE(launch(with("TORCHELASTIC_USE_AGENT_STORE", "True")).store_is_up);
  EXPECT_EQ(launch(with("TORCHELASTIC_RESTART_COUNT", "3")).attempt, "3");
}

TEST(Launch, Slurm) {
  const Launch l = launch({{"MASTER_ADDR", "n1"},
                           {"MASTER_PORT", "1234"},
                           {"SLURM_PROCID", "5"},
                           {"SLURM_NTASKS", "8"},
                           {"SLURM_LOCALID", "1"}});
  EXPECT_EQ(l.rank, 5);
  EXPECT_EQ(l.size, 8);
  EXPECT_EQ(l.local_rank, 1);
}

TEST(Launch, FaultsNameTheVariable) {
  const auto expect = [](const std::string& name, const std::string& value,
                         std::initializer_list<std::string> parts) {
    testing::expect_error([&] { launch(with(name, value)); }, parts);
  };
  expect("RANK", "", {"RANK is not set"});
  expect("RANK", "2", {"RANK: expected a number from 0 to 1, got \"2\""});
  expect("RANK", "x", {"RANK", "\"x\""});
  expect("WORLD_SIZE", "0", {"WORLD_SIZE", "\"0\""});
  expect("MASTER_ADDR", "", {"MASTER_ADDR is not set"});
  expect("MASTER_PORT", "", {"MASTER_PORT is not set"});
  expect("MASTER_PORT", "70000", {"MASTER_PORT", "70000"});
}

}  // namespace
}  // namespace godwit::dist
