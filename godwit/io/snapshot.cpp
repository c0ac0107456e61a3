#include "godwit/io/snapshot.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/log.h"
#include "godwit/base/parallel.h"
#include "godwit/io/checksum.h"
#include "godwit/io/jsonl.h"

namespace godwit::io {
namespace {

constexpr std::string_view kFormat = "godwit-snapshot";
constexpr int kVersion = 1;
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporary = ".tmp";

struct ListedFile {
  std::string name;  // relative, with '/'
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

// N of "step-N"; none for any other name, "step-007" included.
std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || end != digits.data() + digits.size() || fmt::format("{}", step) != digits ||
      step < 0) {
    return std::nullopt;
  }
  return step;
}

void remove_directory(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail("cannot remove {}: {}", path.string(), error.message());
}

// Below `directory`, sorted by name, with sizes and checksums.
std::vector<ListedFile> list_files(const fs::path& directory) {
  std::vector<ListedFile> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_directory()) continue;
    check(entry.is_regular_file() && !entry.is_symlink(),
          "{} cannot be part of a snapshot: not a regular file", entry.path().string());
    const fs::path name = entry.path().lexically_relative(directory);
    if (name != kSnapshotFile) files.push_back({name.generic_string(), entry.file_size(), 0});
  }
  std::ranges::sort(files, {}, &ListedFile::name);
  parallel_for(0, static_cast<int64_t>(files.size()), /*grain=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) files[i].checksum = xxh3_file(directory / files[i].name);
  });
  return files;
}

std::string to_json(int64_t step, const std::vector<ListedFile>& files) {
  nlohmann::ordered_json json;
  json["format"] = kFormat;
  json["version"] = kVersion;
  json["step"] = step;
  json["files"] = nlohmann::ordered_json::array();
  for (const auto& file : files)
    json["files"].push_back({{"file", file.name}, {"bytes", file.bytes}, {"xxh3", hex64(file.checksum)}});
  return json.dump(2) + "\n";
}

std::vector<ListedFile> read_list(const fs::path& snapshot) {
  const fs::path path = snapshot / kSnapshotFile;
  const nlohmann::json json = read_json(path);
  std::vector<ListedFile> files;
  try {
    check(json.at("format") == kFormat && json.at("version") == kVersion,
          "{}: expected format {} version {}, got {} version {}", path.string(), kFormat, kVersion,
          json.at("format").dump(), json.at("version").dump());
    const auto step = step_of(snapshot.filename().string());
    check(!step || json.at("step") == *step, "{}: it is of step {}", path.string(), json.at("step").dump());
    for (const auto& entry : json.at("files")) {
      files.push_back({entry.at("file").get<std::string>(), entry.at("bytes").get<uint64_t>(),
                       parse_hex64(entry.at("xxh3").get<std::string>(), path.string() + ": xxh3")});
      const fs::path name = files.back().name;
      check(name.is_relative() && !name.empty() && *name.lexically_normal().begin() != "..",
            "{}: a file outside the snapshot: {}", path.string(), entry.at("file").dump());
    }
  } catch (const nlohmann::json::exception& error) {
    fail("{}: not a list of files: {}", path.string(), error.what());
  }
  check(!files.empty(), "{}: it lists no file", path.string());
  return files;
}

void verify_file(const fs::path& snapshot, const ListedFile& file, SnapshotCheck how) {
  const fs::path path = snapshot / file.name;
  std::error_code error;
  const uint64_t size = fs::file_size(path, error);
  if (error) fail("{}: {}", path.string(), error.message());
  check(size == file.bytes, "{} has {} bytes, expected {}", path.string(), size, file.bytes);
  if (how == SnapshotCheck::kSizes) return;
  const uint64_t checksum = xxh3_file(path);
  check(checksum == file.checksum, "{} is damaged: checksum {}, expected {}", path.string(), hex64(checksum),
        hex64(file.checksum));
}

// Warns and returns false where verify_snapshot throws.
bool is_valid(const fs::path& root, int64_t step, SnapshotCheck how) {
  try {
    verify_snapshot(snapshot_path(root, step), how);
    return true;
  } catch (const Error& error) {
    log_warn("snapshot of step {} is not valid: {}", step, error.what());
    return false;
  }
}

}  // namespace

fs::path snapshot_path(const fs::path& root, int64_t step) {
  return root / fmt::format("{}{}", kPrefix, step);
}

fs::path snapshot_temporary(const fs::path& root, int64_t step) {
  return root / fmt::format("{}{}{}", kPrefix, step, kTemporary);
}

SnapshotWriter::SnapshotWriter(fs::path root, int64_t step)
    : root_(std::move(root)), step_(step), directory_(snapshot_temporary(root_, step)) {
  check(step >= 0, "a snapshot of step {}", step);
  make_directories(root_);
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(root_)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(kTemporary) &&
        step_of(std::string_view(name).substr(0, name.size() - kTemporary.size()))) {
      stale.push_back(entry.path());
    }
  }
  for (const auto& path : stale) remove_directory(path);
  make_directories(directory_);
}

SnapshotWriter::~SnapshotWriter() {
  std::error_code ignored;
  if (!directory_.empty()) fs::remove_all(directory_, ignored);
}

void SnapshotWriter::commit() {
  check(!directory_.empty(), "{} is already committed", snapshot_path(root_, step_).string());
  write_file_atomic(directory_ / kSnapshotFile, to_json(step_, list_files(directory_)));
  sync_tree(directory_);
  replace_directory(directory_, snapshot_path(root_, step_));
  directory_.clear();
}

void verify_snapshot(const fs::path& snapshot, SnapshotCheck how) {
  const std::vector<ListedFile> files = read_list(snapshot);
  parallel_for(0, static_cast<int64_t>(files.size()), /*grain=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) verify_file(snapshot, files[i], how);
  });
}

std::vector<int64_t> list_snapshots(const fs::path& root) {
  std::vector<int64_t> steps;
  std::error_code error;
  if (!fs::is_directory(root, error)) return steps;
  for (const auto& entry : fs::directory_iterator(root)) {
    const auto step = step_of(entry.path().filename().string());
    if (step && entry.is_directory()) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

std::optional<int64_t> latest_valid_snapshot(const fs::path& root, SnapshotCheck how) {
  const std::vector<int64_t> steps = list_snapshots(root);
  const auto newest =
      std::find_if(steps.rbegin(), steps.rend(), [&](int64_t step) { return is_valid(root, step, how); });
  return newest == steps.rend() ? std::nullopt : std::optional(*newest);
}

std::vector<int64_t> prune_snapshots(const fs::path& root, int64_t keep) {
  check(keep >= 1, "{}: {} snapshots to keep, expected at least 1", root.string(), keep);
  const std::vector<int64_t> steps = list_snapshots(root);
  if (static_cast<int64_t>(steps.size()) <= keep || !is_valid(root, steps.back(), SnapshotCheck::kChecksums))
    return {};
  std::vector<int64_t> removed;
  int64_t valid = 1;
  for (auto step = steps.rbegin() + 1; step != steps.rend(); ++step) {
    if (valid < keep) {
      valid += is_valid(root, *step, SnapshotCheck::kSizes);
      continue;
    }
    // Under its temporary name first: a half-removed snapshot must not look like one.
    const fs::path leaving = snapshot_temporary(root, *step);
    remove_directory(leaving);
    rename_durable(snapshot_path(root, *step), leaving);
    remove_directory(leaving);
    removed.push_back(*step);
  }
  return removed;
}

}  // namespace godwit::io
