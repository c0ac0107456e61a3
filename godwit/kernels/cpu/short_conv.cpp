// Causal depthwise convolution with SiLU. Work is cut into tiles of kTokens tokens of one sequence by
// kChannels channels; rows of a tile are walked in order, so the W rows that a token needs are still in L1.
#include "godwit/kernels/short_conv.h"

#include <algorithm>
#include <vector>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/simd.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

constexpr int64_t kTokens = 64;
constexpr int64_t kChannels = 256;
constexpr int64_t kMaxGroups = 64;  // of blocks, for the sum of the weight gradient

// Tokens [begin, end) of sequence n; also one, empty, for a sequence without tokens.
struct Block {
  int64_t n, begin, end;
};

std::vector<Block> cut(const ShortConvInputs& in) {
  std::vector<Block> blocks;
  for (int64_t n = 0; n < in.sequences; ++n) {
    const int64_t first = in.cu_seqlens[n], last = in.cu_seqlens[n + 1];
    int64_t t = first;
    do {
      blocks.push_back({n, t, std::min(last, t + kTokens)});
      t += kTokens;
    } while (t < last);
  }
  return blocks;
}

// weight [C, W] -> [W, C].
std::vector<float> transpose_weight(const ShortConvInputs& in) {
  std::vector<float> out(static_cast<size_t>(in.taps * in.channels));
  for (int64_t c = 0; c < in.channels; ++c) {
    for (int64_t j = 0; j < in.taps; ++j) out[j * in.channels + c] = in.weight[c * in.taps + j];
  }
  return out;
}

// The inputs of one sequence in a band of channels, by position; negative positions come from the state.
class Band {
 public:
  // memory: (W-1) * kChannels floats.
  Band(const ShortConvInputs& in, int64_t n, int64_t channel, int64_t width, float* memory)
      : x_(in.x + in.cu_seqlens[n] * in.x_stride + channel),
        stride_(in.x_stride),
        past_(in.taps - 1),
        before_(memory) {
    for (int64_t r = 0; r < past_; ++r) {
      for (int64_t c = 0; c < width; ++c) {
        before_[r * kChannels + c] =
            in.state != nullptr ? in.state[((n * in.channels) + channel + c) * past_ + r] : 0;
      }
    }
  }
  const float* row(int64_t position) const {
    return position >= 0 ? x_ + position * stride_ : before_ + (position + past_) * kChannels;
  }

 private:
  const float* x_;
  int64_t stride_, past_;
  float* before_;
};

// fn(c, get, put) over the vectors of a band.
template <class Fn>
inline void for_vectors(int64_t width, const Fn& fn) {
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    fn(
        c, [](const float* p) { return load(p); }, [](float* p, Vec v) { store(p, v); });
  }
  if (c == width) return;
  const int64_t left = width - c;
  fn(
      c, [left](const float* p) { return load_part(p, left); },
      [left](float* p, Vec v) { store_part(p, v, left); });
}

// fn(c, sum, put) with sum = sum_j weight[j] x_{position-W+1+j}: the same order of additions for every
// caller.
template <class Fn>
void convolve(const ShortConvInputs& in, const Band& band, const float* weight, int64_t position,
              int64_t width, const Fn& fn) {
  if (in.taps == 4) {
    const float *x0 = band.row(position - 3), *x1 = band.row(position - 2), *x2 = band.row(position - 1);
    const float *x3 = band.row(position), *w1 = weight + in.channels, *w2 = w1 + in.channels,
                *w3 = w2 + in.channels;
    for_vectors(width, [&](int64_t c, const auto& get, const auto& put) {
      Vec sum = get(weight + c) * get(x0 + c);
      sum = fma(get(w1 + c), get(x1 + c), sum);
      sum = fma(get(w2 + c), get(x2 + c), sum);
      sum = fma(get(w3 + c), get(x3 + c), sum);
      fn(c, sum, get, put);
    });
    return;
  }
  for_vectors(width, [&](int64_t c, const auto& get, const auto& put) {
    Vec sum = get(weight + c) * get(band.row(position - in.taps + 1) + c);
    for (int64_t j = 1; j < in.taps; ++j) {
      sum = fma(get(weight + j * in.channels + c), get(band.row(position - in.taps + 1 + j) + c), sum);
    }
    fn(c, sum, get, put);
  });
}

int64_t bands(const ShortConvInputs& in) {
  return (in.channels + kChannels - 1) / kChannels;
}

void forward_tile(const ShortConvInputs& in, const float* weight, const Block& b, int64_t channel, float* y,
                  float* final_state) {
  const int64_t width = std::min(kChannels, in.channels - channel), past = in.taps - 1;
  const int64_t first = in.cu_seqlens[b.n], last = in.cu_seqlens[b.n + 1];
  const Band band(in, b.n, channel, width, thread_scratch((past + 1) * kChannels));
  for (int64_t t = b.begin; t < b.end; ++t) {
    float* out = y + t * in.channels + channel;
    convolve(in, band, weight + channel, t - first, width,
             [&](int64_t c, Vec sum, const auto&, const auto& put) { put(out + c, sum * vsigmoid(sum)); });
  }
  if (b.end < last) return;
  for (int64_t r = 0; r < past; ++r) {
    const float* row = band.row(last - first - past + r);
    for (int64_t c = 0; c < width; ++c) final_state[(b.n * in.channels + channel + c) * past + r] = row[c];
  }
}

// The gradients of one tile. dweight [W, kChannels] is added to.
void backward_tile(const ShortConvInputs& in, const ShortConvGrads& g, const float* weight, const Block& b,
                   int64_t channel, float* memory, float* dweight) {
  const int64_t width = std::min(kChannels, in.channels - channel), past = in.taps - 1;
  const int64_t first = in.cu_seqlens[b.n], last = in.cu_seqlens[b.n + 1];
  const Band band(in, b.n, channel, width, memory);
  // dsum of the tokens [b.begin, halo_end), which the inputs of the block reach.
  float* dsum = memory + past * kChannels;
  const int64_t halo_end = std::min(last, b.end + past);
  for (int64_t t = b.begin; t < halo_end; ++t) {
    const float* dy = g.grad_y != nullptr ? g.grad_y + t * in.channels + channel : nullptr;
    float* out = dsum + (t - b.begin) * kChannels;
    convolve(in, band, weight + channel, t - first, width,
             [&](int64_t c, Vec sum, const auto& get, const auto& put) {
               const Vec s = vsigmoid(sum);
               const Vec slope = s * (splat(1.0f) + sum * (splat(1.0f) - s));
               put(out + c, dy != nullptr ? get(dy + c) * slope : Vec{});
             });
  }
  for (int64_t t = b.begin; t < b.end; ++t) {
    for (int64_t j = 0; j < in.taps; ++j) {
      const float *d = dsum + (t - b.begin) * kChannels, *x = band.row(t - first - past + j);
      float* sum = dweight + j * kChannels;
      for_vectors(width, [&](int64_t c, const auto& get, const auto& put) {
        put(sum + c, get(sum + c) + get(d + c) * get(x + c));
      });
    }
  }
  // An input at `position` reaches the tokens position .. position + W - 1 and, near the end, the final
  // state.
  const auto input_grad = [&](int64_t position, float* out) {
    for_vectors(width, [&](int64_t c, const auto& get, const auto& put) {
      Vec sum = {};
      for (int64_t j = past; j >= 0; --j) {
        const int64_t t = first + position + past - j;
        if (t < b.begin || t >= halo_end) continue;
        sum += get(weight + j * in.channels + channel + c) * get(dsum + (t - b.begin) * kChannels + c);
      }
      put(out + c, sum);
    });
    const int64_t r = position - (last - first - past);
    if (g.grad_final_state == nullptr || r < 0) return;
    const float* final_grad = g.grad_final_state + (b.n * in.channels + channel) * past + r;
    for (int64_t c = 0; c < width; ++c) out[c] += final_grad[c * past];
  };
  for (int64_t t = b.begin; t < b.end; ++t) input_grad(t - first, g.dx + t * in.channels + channel);
  if (g.dstate == nullptr || b.begin > first) return;
  for (int64_t r = 0; r < past; ++r) {
    float* row = memory;  // the band's own past is no longer needed
    input_grad(r - past, row);
    for (int64_t c = 0; c < width; ++c) g.dstate[(b.n * in.channels + channel + c) * past + r] = row[c];
  }
}

}  // namespace

void short_conv_forward(const ShortConvInputs& in, float* y, float* final_state) {
  const std::vector<Block> blocks = cut(in);
  const std::vector<float> weight = transpose_weight(in);
  const int64_t columns = bands(in);
  parallel_for(0, static_cast<int64_t>(blocks.size()) * columns, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      forward_tile(in, weight.data(), blocks[i / columns], i % columns * kChannels, y, final_state);
    }
  });
}

void short_conv_step(int64_t channels, int64_t taps, const float* x, const float* weight, float* state,
                     float* y) {
  const int64_t past = taps - 1;
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, channels - c);
    const float* w = weight + c * taps;
    float* s = state + c * past;
    const Vec now = load_part(x + c, lanes);
    Vec sum = {};
    for (int64_t j = 0; j < taps; ++j) {
      float weights[kLanes] = {}, inputs[kLanes] = {};
      for (int64_t i = 0; i < lanes; ++i) weights[i] = w[i * taps + j];
      for (int64_t i = 0; i < lanes && j < past; ++i) inputs[i] = s[i * past + j];
      const Vec input = j < past ? load(inputs) : now;
      sum = j == 0 ? load(weights) * input : fma(load(weights), input, sum);
    }
    store_part(y + c, sum * vsigmoid(sum), lanes);
    for (int64_t i = 0; i < lanes; ++i) {
      for (int64_t j = 0; j + 1 < past; ++j) s[i * past + j] = s[i * past + j + 1];
      if (past > 0) s[i * past + past - 1] = x[c + i];
    }
  }
}

void short_conv_backward(const ShortConvInputs& in, const ShortConvGrads& g) {
  const std::vector<Block> blocks = cut(in);
  const std::vector<float> weight = transpose_weight(in);
  const int64_t columns = bands(in), count = static_cast<int64_t>(blocks.size());
  const int64_t per_group = std::max<int64_t>(1, (count + kMaxGroups - 1) / kMaxGroups);
  const int64_t groups = (count + per_group - 1) / per_group, tile = in.taps * kChannels;
  std::vector<float> partial(static_cast<size_t>(groups * columns * tile), 0.0f);
  parallel_for(0, groups * columns, 1, [&](int64_t from, int64_t to) {
    float* memory = thread_scratch((2 * in.taps + kTokens) * kChannels);
    for (int64_t i = from; i < to; ++i) {
      const int64_t group = i / columns, channel = i % columns * kChannels;
      for (int64_t b = group * per_group; b < std::min(count, (group + 1) * per_group); ++b) {
        backward_tile(in, g, weight.data(), blocks[b], channel, memory, partial.data() + i * tile);
      }
    }
  });
  for (int64_t c = 0; c < in.channels; ++c) {
    for (int64_t j = 0; j < in.taps; ++j) {
      float sum = 0;  // group by group: the order does not depend on the threads
      for (int64_t group = 0; group < groups; ++group) {
        sum += partial[(group * columns + c / kChannels) * tile + j * kChannels + c % kChannels];
      }
      g.dweight[c * in.taps + j] = sum;
    }
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
