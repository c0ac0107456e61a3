#include "godwit/train/state.h"

#include <sstream>

#include "godwit/base/check.h"

namespace godwit {
namespace {

std::string describe(const at::Tensor& tensor) {
  std::stringstream out;
  out << tensor.scalar_type() << " " << tensor.sizes();
  return out.str();
}

}  // namespace

StateMap collect_state(const std::function<void(const StateVisitor&)>& for_each) {
  StateMap out;
  for_each([&](const std::string& name, at::Tensor& tensor) {
    check(out.emplace(name, tensor).second, "state: two tensors are called {}", name);
  });
  return out;
}

void load_state_strict(const std::string& what, const std::function<void(const StateVisitor&)>& for_each,
                       const StateMap& saved) {
  // All checks come before the first copy, so that a refused load changes nothing.
  StateMap wanted = collect_state(for_each);
  for (const auto& [name, tensor] : wanted) {
    const auto found = saved.find(name);
    check(found != saved.end(), "{}: the saved state lacks {}", what, name);
    check(found->second.sizes() == tensor.sizes() && found->second.scalar_type() == tensor.scalar_type(),
          "{}: {}: expected {}, the saved state has {}", what, name, describe(tensor),
          describe(found->second));
  }
  for (const auto& [name, tensor] : saved)
    check(wanted.contains(name), "{}: the saved state has {}, which nothing here asks for", what, name);
  for (auto& [name, tensor] : wanted) tensor.copy_(saved.at(name));
}

}  // namespace godwit
