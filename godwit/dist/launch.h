// How this process was started as one of many: the variables that torchrun, Slurm and Kubernetes set.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace godwit::dist {

struct Launch {
  int64_t rank = 0, size = 1;
  int64_t local_rank = 0;  // on this host: which GPU
  std::string host = {};   // MASTER_ADDR, MASTER_PORT: where the ranks meet
  uint16_t port = 0;
  bool store_is_up = false;  // the launcher itself serves the meeting place (torchrun); else rank 0 does
  std::string attempt = {};  // tells restarts by the launcher apart
};

using Environment = std::function<const char*(const char* name)>;

// One process where WORLD_SIZE is not set or 1. RANK, WORLD_SIZE and LOCAL_RANK fall back to SLURM_PROCID,
// SLURM_NTASKS and SLURM_LOCALID where MASTER_ADDR is set. Throws Error when a variable is missing or
// impossible.
Launch launch_from(const Environment& environment);
Launch launch_from_environment();

}  // namespace godwit::dist
