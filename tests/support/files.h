// Help for tests that touch files: a scratch directory, expected errors, a small full disk.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mount.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <system_error>

#include "godwit/base/check.h"

namespace godwit::testing {

// An empty directory that goes away with the object.
class ScratchDir {
 public:
  ScratchDir() {
    std::string name = (std::filesystem::temp_directory_path() / "godwit-test-XXXXXX").string();
    if (!::mkdtemp(name.data())) fail("cannot create {}", name);
    path_ = name;
  }
  ~ScratchDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  int64_t entries() const {
    return std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator());
  }

 private:
  std::filesystem::path path_;
};

// A file system of `kib` KiB in memory. Only root can mount one: mounted() is false elsewhere.
class SmallDisk {
 public:
  explicit SmallDisk(int kib) {
    const std::string options = fmt::format("size={}k", kib);
    mounted_ = ::mount("tmpfs", dir_.path().c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(dir_.path().c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  const std::filesystem::path& path() const { return dir_.path(); }

 private:
  ScratchDir dir_;
  bool mounted_ = false;
};

// Writes a file plainly and without a sync to disk, for tests that write thousands. (Removed first: ext4
// flushes a file that is truncated and written again.)
inline void put_file(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::remove(path);
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (!file) fail("cannot write {}", path.string());
}

// `action` must throw a godwit::Error of one line whose text holds every one of `parts`.
inline void expect_error(const std::function<void()>& action, std::initializer_list<std::string> parts) {
  try {
    action();
  } catch (const Error& error) {
    const std::string text = error.what();
    for (const auto& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos)
          << "the error is: " << text << "\nit should name: " << part;
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an exception that is no godwit::Error: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error" << (parts.size() > 0 ? "; expected one that names " + *parts.begin() : "");
}

}  // namespace godwit::testing
