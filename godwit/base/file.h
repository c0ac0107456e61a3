// Whole files in and out. A file is written beside its place and renamed, so that no reader ever sees half of
// one.
#pragma once

#include <string>
#include <string_view>

namespace godwit {

// All bytes of `path`. Throws Error that names the path and the system's reason.
std::string read_file(const std::string& path);
// The same for parts of a model or checkpoint: nothing but a regular file, whose reading cannot wait.
std::string read_regular_file(const std::string& path);

// Writes `path`.tmp-<process id>, then renames it to `path`. Throws Error and leaves nothing behind on
// failure.
void write_file(const std::string& path, std::string_view bytes);

}  // namespace godwit
