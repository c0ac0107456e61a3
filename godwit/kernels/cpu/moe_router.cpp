// A row's largest values without sorting it: the row is cut into groups of lanes, the (k+1)-th largest of the
// groups' maxima is a bound that at least k+1 elements reach and few exceed; those few are collected in index
// order and put in a sorted list by insertion. Exact, ties included, and independent of other rows.
#include "godwit/kernels/cpu/moe_router_isa.h"
#include "godwit/kernels/cpu/simd.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

const float kMinusInfinity = -__builtin_inff();

// Bit i: a_i >= b_i.
uint32_t mask_ge(Vec a, Vec b) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GE_OQ);
#else
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ)));
#endif
}

// A token's work memory.
struct Work {
  Work(const RouterForm& form, float* scratch)
      : vectors((form.experts + kLanes - 1) / kLanes),
        biased(scratch),
        value(biased + form.experts + 64),
        index(reinterpret_cast<int32_t*>(value + form.experts + 64)),
        best_value(reinterpret_cast<float*>(index) + form.experts + 64),
        best_index(reinterpret_cast<int32_t*>(best_value + form.k + 1)),
        group(reinterpret_cast<float*>(best_index) + form.k + 1),
        scores(group + 2 * form.groups) {}
  int64_t vectors;
  float* biased;  // s + bias, -inf beyond the experts
  float* value;   // candidates, in index order
  int32_t* index;
  float* best_value;  // sorted list of k + 1
  int32_t* best_index;
  float* group;   // [groups] scores, then the chosen groups' scores
  float* scores;  // s, where nobody wants them
};
float* scores_of(const RouterForward& a, int64_t t, const Work& w) {
  return a.scores != nullptr ? a.scores + t * a.form.experts : w.scores;
}

// s and s + bias; the last vector is filled up with -inf.
void score(const RouterForward& a, int64_t t, const Work& w) {
  const int64_t experts = a.form.experts;
  const float* logits = a.logits + t * experts;
  float* scores = scores_of(a, t, w);
  const auto ranked = [](Vec x) { return x == x ? x : splat(kMinusInfinity); };
  int64_t e = 0;
  for (; e + kLanes <= experts; e += kLanes) {
    const Vec s = vsigmoid(load(logits + e));
    store(scores + e, s);
    store(w.biased + e, ranked(s + load(a.bias + e)));
  }
  if (e == experts) return;
  const int64_t rest = experts - e;
  Vec x = {}, b = {};
  std::memcpy(&x, logits + e, rest * sizeof(float));
  std::memcpy(&b, a.bias + e, rest * sizeof(float));
  const Vec s = vsigmoid(x);
  std::memcpy(scores + e, &s, rest * sizeof(float));
  store(w.biased + e, ranked(s + b));
  for (int64_t i = experts; i < w.vectors * kLanes; ++i) w.biased[i] = kMinusInfinity;
}

// Puts (value, index) into the list of `size` entries sorted by falling value, behind equal ones; the list
// keeps `capacity`. Returns the new size.
int64_t insert(float value, int32_t index, float* values, int32_t* indices, int64_t size, int64_t capacity) {
  if (size == capacity && !(value > values[size - 1])) return size;
  int64_t at = size < capacity ? size : size - 1;
  for (; at > 0 && value > values[at - 1]; --at) {
    values[at] = values[at - 1];
    indices[at] = indices[at - 1];
  }
  values[at] = value;
  indices[at] = index;
  return size < capacity ? size + 1 : size;
}

// Leaves only the experts of the best groups.
void limit_to_groups(const RouterForm& form, const Work& w) {
  const int64_t size = form.experts / form.groups;
  float* best = w.group + form.groups;
  int64_t kept = 0;
  for (int64_t g = 0; g < form.groups; ++g) {
    float first = kMinusInfinity, second = kMinusInfinity;
    for (int64_t i = 0; i < size; ++i) {
      const float x = w.biased[g * size + i];
      second = x > first ? first : (x > second ? x : second);
      first = x > first ? x : first;
    }
    w.group[g] = size > 1 ? first + second : first;
    kept = insert(w.group[g], static_cast<int32_t>(g), best, w.index, kept, form.topk_groups);
  }
  for (int64_t g = 0; g < form.groups; ++g) {
    bool keep = false;
    for (int64_t i = 0; i < kept; ++i) keep = keep || w.index[i] == g;
    for (int64_t i = 0; i < size && !keep; ++i) w.biased[g * size + i] = kMinusInfinity;
  }
}

// A value that at least `wanted` elements of the row reach.
float lower_bound(const Work& w, int64_t wanted) {
  constexpr int kMostMaxima = 8;  // vectors of group maxima
  const int64_t maxima = (3 * wanted + kLanes - 1) / kLanes;
  if (maxima > kMostMaxima || 2 * maxima > w.vectors) return kMinusInfinity;
  Vec top[kMostMaxima];
  for (int64_t i = 0; i < maxima; ++i) top[i] = load(w.biased + i * kLanes);
  for (int64_t v = maxima; v < w.vectors; v += maxima) {
    for (int64_t i = 0; i < maxima && v + i < w.vectors; ++i)
      top[i] = vmax(top[i], load(w.biased + (v + i) * kLanes));
  }
  float flat[kMostMaxima * kLanes];
  for (int64_t i = 0; i < maxima; ++i) store(flat + i * kLanes, top[i]);
  float bound = kMinusInfinity;
  for (int64_t j = 0; j < maxima * kLanes; ++j) {
    int64_t reached = 0;
    for (int64_t i = 0; i < maxima; ++i) reached += __builtin_popcount(mask_ge(top[i], splat(flat[j])));
    if (reached >= wanted && flat[j] > bound) bound = flat[j];
  }
  return bound;
}

// The best k + 1 (all, if there are no more) of the row.
int64_t select(const RouterForm& form, const Work& w) {
  const int64_t wanted = form.k < form.experts ? form.k + 1 : form.k;
  const Vec bound = splat(lower_bound(w, wanted));
  int64_t candidates = 0;
  for (int64_t v = 0; v < w.vectors; ++v) {
    uint32_t reached = mask_ge(load(w.biased + v * kLanes), bound);
    while (reached != 0) {
      const int64_t e = v * kLanes + __builtin_ctz(reached);
      reached &= reached - 1;
      if (e >= form.experts) break;
      w.value[candidates] = w.biased[e];
      w.index[candidates++] = static_cast<int32_t>(e);
    }
  }
  int64_t size = 0;
  for (int64_t c = 0; c < candidates; ++c) {
    size = insert(w.value[c], w.index[c], w.best_value, w.best_index, size, wanted);
  }
  return wanted;
}

}  // namespace

void router_fwd_range(const RouterForward& a, int64_t begin, int64_t end, float* scratch) {
  const RouterForm& form = a.form;
  const Work w(form, scratch);
  for (int64_t t = begin; t < end; ++t) {
    score(a, t, w);
    if (form.groups > 1 && form.topk_groups < form.groups) limit_to_groups(form, w);
    const int64_t found = select(form, w);
    a.cutoff[t] = found > form.k ? w.best_value[form.k] : kMinusInfinity;
    const float* scores = scores_of(a, t, w);
    float sum = 0;
    for (int64_t i = 0; i < form.k; ++i) sum += scores[w.best_index[i]];
    const bool normal = form.renormalize && form.k > 1;
    for (int64_t i = 0; i < form.k; ++i) {
      const float s = scores[w.best_index[i]];
      a.chosen[t * form.k + i] = w.best_index[i];
      a.weights[t * form.k + i] = (normal ? s / (sum + 1e-20f) : s) * form.scale;
    }
  }
}

// p_i = scale s_i / S: d s_i = scale (d p_i - sum_j d p_j s_j / S) / S, and d logit = d s s (1 - s).
void router_bwd_range(const RouterBackward& a, int64_t begin, int64_t end) {
  const RouterForm& form = a.form;
  const bool normal = form.renormalize && form.k > 1;
  for (int64_t t = begin; t < end; ++t) {
    const float* logits = a.logits + t * form.experts;
    const float* d_p = a.d_weights + t * form.k;
    const int32_t* chosen = a.chosen + t * form.k;
    float* out = a.d_logits + t * form.experts;  // the chosen scores first
    std::memset(out, 0, form.experts * sizeof(float));
    for (int64_t i = 0; i < form.k; i += kLanes) {
      const int64_t count = form.k - i < kLanes ? form.k - i : kLanes;
      Vec x = {};
      for (int64_t j = 0; j < count; ++j) x[j] = logits[chosen[i + j]];
      const Vec s = vsigmoid(x);
      for (int64_t j = 0; j < count; ++j) out[chosen[i + j]] = s[j];
    }
    float sum = 0, along = 0;
    for (int64_t i = 0; i < form.k; ++i) {
      sum += out[chosen[i]];
      along += d_p[i] * out[chosen[i]];
    }
    const float inverse = normal ? 1 / (sum + 1e-20f) : 1;
    const float mean = normal ? along * inverse : 0;
    for (int64_t i = 0; i < form.k; ++i) {
      const float s = out[chosen[i]];
      out[chosen[i]] = form.scale * (d_p[i] - mean) * inverse * s * (1 - s);
    }
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
