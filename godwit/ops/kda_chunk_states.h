// Shared by the registrations of kda_chunk_states: its schema as a C++ signature, and the plain composition.
#pragma once

#include <ATen/core/Tensor.h>

#include "godwit/ops/ref/kda_ref.h"

namespace godwit::ops {

using KdaChunkStatesResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using KdaChunkStatesSignature = KdaChunkStatesResult(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                     const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                     const at::Tensor&, double,
                                                     const std::optional<at::Tensor>&, const at::Tensor&,
                                                     const at::Tensor&);

// kda_chunk piece by piece between the boundaries.
KdaChunkStatesResult kda_chunk_states_composition(const KdaArgs& args, const at::Tensor& at);

}  // namespace godwit::ops
