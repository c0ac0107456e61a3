// What a checkpoint must carry beside the weights, as named tensors. Loading is strict: a key that is
// missing, unknown or of another shape or dtype is an error, never a partial load.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>

namespace godwit {

using StateVisitor = std::function<void(const std::string& name, at::Tensor& tensor)>;
using StateMap = std::map<std::string, at::Tensor>;

// Shares storage with the visited tensors.
StateMap collect_state(const std::function<void(const StateVisitor&)>& for_each);

// Copies `saved` into the visited tensors. `what` names the owner in errors.
void load_state_strict(const std::string& what, const std::function<void(const StateVisitor&)>& for_each,
                       const StateMap& saved);

}  // namespace godwit
