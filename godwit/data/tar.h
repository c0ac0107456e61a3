// Members of a tar archive (ustar, GNU long names, pax paths), in the order of the file: how WebDataset
// shards keep samples.
#pragma once

#include <functional>
#include <string>

#include "godwit/io/file.h"

namespace godwit::data {

// Regular files only. The bytes lie in the mapped archive and are valid during the call; `consumed` is where
// the member ends. A damaged or truncated archive is an Error that names it.
using TarMemberFn = std::function<void(const std::string& name, io::Bytes bytes, uint64_t consumed)>;
void read_tar(const io::fs::path& path, const TarMemberFn& visit);

}  // namespace godwit::data
