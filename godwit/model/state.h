// What sequences carry from one forward call to the next, for many sequences in one store. One logical
// boundary for both kinds of layer: after a call every layer of a sequence stands at the same token.
//
//   KDA layers   one slot a sequence: recurrent state and the inputs its convolutions still need
//   MLA layers   pages of kLatentPage rows (normalised latent | k_pe), one list of pages a sequence for all
//                layers; full pages are shared between sequences and snapshots and never written again
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "godwit/model/config.h"

namespace godwit {

// Tokens of a page. A multiple of the chunk of KDA's chunked form, so that a state at a page boundary has the
// same bits however the tokens before it were fed.
inline constexpr int64_t kLatentPage = 64;

// Latents in 8 bits: e4m3 without a scale, for rows that a norm has given the size of its weights.
inline constexpr at::ScalarType kFp8Latent = at::ScalarType::Float8_e4m3fn;

// Leading dimension: slots.
struct KdaState {
  at::Tensor conv_q, conv_k, conv_v;  // [S, H*K, W-1] the last inputs of the convolutions
  at::Tensor recurrent;               // [S, H, K, V] fp32
  // Of the last call with PackedBatch::record: what its step rows brought to the states, [rows, 4 H*K + H]
  // (q | k | v | z | b as projected), so that some of them can be taken back (see replay_steps).
  at::Tensor step_inputs;

  std::vector<at::Tensor*> tensors() { return {&conv_q, &conv_k, &conv_v, &recurrent}; }
  std::vector<const at::Tensor*> tensors() const { return {&conv_q, &conv_k, &conv_v, &recurrent}; }
};

struct LayerState {
  KdaState kda;      // KDA layers
  at::Tensor pages;  // [pages, kLatentPage, R + P], MLA layers; of the activations' dtype or fp8
};

// Which pages are free, and how many lists hold each of the others.
struct PagePool {
  std::vector<int32_t> holders;
  std::vector<int32_t> free;
};

// Pages held by a sequence or a snapshot. A copy shares them.
class PageList {
 public:
  explicit PageList(std::shared_ptr<PagePool> pool) : pool_(std::move(pool)) {}
  PageList(const PageList& other);
  PageList(PageList&& other) noexcept = default;
  PageList& operator=(PageList other) noexcept;
  ~PageList() { clear(); }

  int64_t size() const { return static_cast<int64_t>(pages_.size()); }
  int32_t operator[](int64_t i) const { return pages_[i]; }
  // Takes a free page; the pool must have one.
  void grow();
  void drop_last();
  void clear();

 private:
  std::shared_ptr<PagePool> pool_;
  std::vector<int32_t> pages_;
};

struct SequenceState {
  int64_t length = 0;  // tokens seen
  PageList pages;
};

// The state of one sequence at one boundary, apart from its slot. Holds its pages until it is destroyed.
struct StateSnapshot {
  int64_t length = 0;
  std::vector<KdaState> kda;  // by layer, leading dimension 1
  PageList pages;

  int64_t bytes() const;  // of what it alone holds: the KDA part
};

// A sequence's state in host memory: nothing of it stays in the store.
struct SwappedState {
  int64_t length = 0;
  std::vector<KdaState> kda;     // by layer, leading dimension 1
  std::vector<at::Tensor> rows;  // by layer, [length, R + P]

  int64_t bytes() const;
};

class ModelState {
 public:
  struct Size {
    int64_t sequences = 1;
    int64_t pages = 0;  // 0: as many as are needed, the store grows
    bool fp8_latents = false;
  };
  // Empty sequences. `dtype` is the activations' dtype, and the latents' but with fp8_latents.
  ModelState(const ModelConfig& config, const Size& size, at::Device device, at::ScalarType dtype);

  int64_t sequences() const { return static_cast<int64_t>(sequences_.size()); }
  const SequenceState& sequence(int64_t n) const { return sequences_[n]; }
  int64_t length(int64_t n) const { return sequences_[n].length; }
  std::vector<LayerState>& layers() { return layers_; }

  // Room for `tokens` more tokens of sequence n. False, and nothing taken, when the store has not enough
  // pages.
  bool reserve(int64_t n, int64_t tokens);
  // Called by the forward: sequence n has `tokens` more.
  void advance(int64_t n, int64_t tokens) { sequences_[n].length += tokens; }
  void clear(int64_t n);

  // The KDA part of sequence n by layer, leading dimension 1, on the device: to go back to.
  std::vector<KdaState> copy_kda(int64_t n) const;
  // Back to that state, `tokens` before the present length. The rows beyond are written again later, so no
  // snapshot may have been taken since.
  void rewind(int64_t n, const std::vector<KdaState>& kda, int64_t tokens);

  // A page that is not full is copied, so one free page may be needed: throws Error where there is none.
  StateSnapshot snapshot(int64_t n);
  void restore(int64_t n, const StateSnapshot& snapshot);
  SwappedState swap_out(int64_t n);
  SwappedState copy_to_host(const StateSnapshot& snapshot) const;
  int64_t host_bytes(const StateSnapshot& snapshot) const;  // what that takes
  // False, and nothing changed, when the store has not enough pages.
  bool swap_in(int64_t n, const SwappedState& swapped);

  int64_t free_pages() const { return static_cast<int64_t>(pool_->free.size()); }
  int64_t pages() const { return static_cast<int64_t>(pool_->holders.size()); }
  int64_t bytes() const;  // held by tensors
  bool fp8_latents() const { return fp8_latents_; }

  // Bytes of one slot and of one page over all layers, from the configuration alone; a page's by the latents'
  // dtype.
  static int64_t slot_bytes(const ModelConfig& config, at::ScalarType dtype);
  static int64_t page_bytes(const ModelConfig& config, at::ScalarType dtype);

 private:
  void grow(int64_t pages);
  std::vector<at::Tensor> copy_rows(const PageList& pages, int64_t length) const;
  void own_last_page(PageList& pages, int64_t length);

  std::shared_ptr<PagePool> pool_;
  std::vector<LayerState> layers_;
  std::vector<SequenceState> sequences_;
  bool grows_ = false;
  bool fp8_latents_ = false;
};

}  // namespace godwit
