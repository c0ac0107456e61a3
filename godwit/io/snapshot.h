// Snapshots of a training run: ROOT/step-N/, each with snapshot.json that lists its files with their sizes
// and XXH3. A snapshot is written as ROOT/step-N.tmp/ and renamed when all of it is on disk, so a directory
// named step-N was complete once; the checksums tell whether it still is. Whatever fails while one is written
// leaves the older ones untouched. One process (rank 0) manages a root; other ranks may write their files
// into directory() before it commits.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "godwit/io/file.h"

namespace godwit::io {

inline constexpr std::string_view kSnapshotFile = "snapshot.json";

fs::path snapshot_path(const fs::path& root, int64_t step);
// Where the snapshot of `step` is while it is written: the same for all ranks.
fs::path snapshot_temporary(const fs::path& root, int64_t step);

class SnapshotWriter {
 public:
  // Creates root/step-N.tmp and removes what interrupted writers have left in the root.
  SnapshotWriter(fs::path root, int64_t step);
  ~SnapshotWriter();  // removes an uncommitted one
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  const fs::path& directory() const { return directory_; }  // put the files here; folders are allowed
  // Checksums of all files, snapshot.json, everything synced, then the rename. A snapshot of the same step is
  // replaced.
  void commit();

 private:
  fs::path root_;
  int64_t step_;
  fs::path directory_;
};

enum class SnapshotCheck {
  kSizes,      // every listed file is there with its size
  kChecksums,  // and has its content: reads everything
};
// Throws an Error that names the first file that differs and how.
void verify_snapshot(const fs::path& snapshot, SnapshotCheck check);

// Steps of the root's snapshots, ascending, valid or not. Empty if there is no such directory.
std::vector<int64_t> list_snapshots(const fs::path& root);

// The newest step whose snapshot is valid; each newer one that is not is named in a warning with what is
// wrong.
std::optional<int64_t> latest_valid_snapshot(const fs::path& root,
                                             SnapshotCheck check = SnapshotCheck::kChecksums);

// Removes all that are older than the newest `keep` valid ones. The newest of all must verify with checksums:
// if it does not, nothing is removed (and a warning says so). Returns the steps removed.
std::vector<int64_t> prune_snapshots(const fs::path& root, int64_t keep);

}  // namespace godwit::io
