// The PyTorch wheels export parts of an older libstdc++: what we call must be the system's, or old
// checkpoints cannot be removed.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>

TEST(Filesystem, IsTheSystemsLibstdcxx) {
  std::uintmax_t (*remove_all)(const std::filesystem::path&) = &std::filesystem::remove_all;
  Dl_info info{};
  ASSERT_NE(dladdr(reinterpret_cast<void*>(remove_all), &info), 0);
  EXPECT_NE(std::string(info.dli_fname).find("libstdc++"), std::string::npos) << info.dli_fname;
}
