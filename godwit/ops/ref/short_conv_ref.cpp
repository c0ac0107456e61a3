#include "godwit/ops/ref/short_conv_ref.h"

#include <ATen/ATen.h>

#include <vector>

#include "godwit/ops/autograd_util.h"

namespace godwit::ops::ref {

using at::Tensor;

// The inputs of all sequences are laid out as state_0, x_0, state_1, x_1, ... so that tap j of every token is
// one row selection.
std::tuple<Tensor, Tensor> short_conv_ref(const Tensor& x, const Tensor& weight,
                                          const std::optional<Tensor>& initial_state,
                                          const Tensor& cu_seqlens) {
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t tokens = x.size(0), channels = x.size(1), taps = weight.size(1), past = taps - 1;
  const int64_t n = cu_seqlens.numel() - 1;
  const int64_t* cu = cu_seqlens.const_data_ptr<int64_t>();
  const auto state_type = initial_state.has_value() ? initial_state->scalar_type() : x.scalar_type();

  std::vector<int64_t> interleave, first_tap, last_inputs;  // rows of cat(x, state), rows of inputs
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < past; ++j) interleave.push_back(tokens + i * past + j);
    for (int64_t t = cu[i]; t < cu[i + 1]; ++t) {
      first_tap.push_back(t + i * past);
      interleave.push_back(t);
    }
    for (int64_t j = 0; j < past; ++j) last_inputs.push_back(cu[i + 1] + i * past + j);
  }
  const auto index = [&](const std::vector<int64_t>& rows) {
    return at::tensor(at::ArrayRef<int64_t>(rows), at::kLong).to(x.device());
  };
  const Tensor state = initial_state.has_value()
                           ? initial_state->to(type).transpose(1, 2).reshape({n * past, channels})
                           : at::zeros({n * past, channels}, x.options().dtype(type));
  const Tensor inputs = at::cat({x.to(type), state}).index_select(0, index(interleave));
  const Tensor rows = index(first_tap), w = weight.to(type);
  Tensor y = at::zeros({tokens, channels}, x.options().dtype(type));
  for (int64_t j = 0; j < taps; ++j) y = y + inputs.index_select(0, rows + j) * w.select(1, j);
  const Tensor final_state =
      inputs.index_select(0, index(last_inputs)).view({n, past, channels}).transpose(1, 2).contiguous();
  return {at::silu(y).to(x.scalar_type()), final_state.to(state_type)};
}

std::tuple<Tensor, Tensor, Tensor> short_conv_ref_grads(const std::optional<Tensor>& grad_y,
                                                        const std::optional<Tensor>& grad_final_state,
                                                        const Tensor& x, const Tensor& weight,
                                                        const std::optional<Tensor>& initial_state,
                                                        const Tensor& cu_seqlens) {
  std::vector<Tensor> inputs = {x, weight};
  if (initial_state.has_value()) inputs.push_back(*initial_state);
  auto grads = composition_grads(inputs, {grad_y, grad_final_state}, [&](const std::vector<Tensor>& in) {
    const auto [y, final_state] =
        short_conv_ref(in[0], in[1], in.size() > 2 ? std::optional(in[2]) : std::nullopt, cu_seqlens);
    return std::vector<Tensor>{y, final_state};
  });
  grads.resize(3);
  return {grads[0], grads[1], grads[2]};
}

}  // namespace godwit::ops::ref
