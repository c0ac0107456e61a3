#include "godwit/model/state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "godwit/base/check.h"

namespace godwit {
namespace {

int64_t pages_for(int64_t tokens) {
  return (tokens + kLatentPage - 1) / kLatentPage;
}

// One slot of a layer as tensors with leading dimension 1, on `device`; none for an MLA layer.
KdaState copy_slot(const KdaState& kda, int64_t n, std::optional<at::Device> device = std::nullopt) {
  KdaState out;
  if (!kda.recurrent.defined()) return out;
  const auto from = kda.tensors();
  const auto to = out.tensors();
  for (size_t i = 0; i < from.size(); ++i) {
    const at::Tensor row = from[i]->narrow(0, n, 1);
    *to[i] = device && *device != row.device() ? row.to(*device) : row.clone();
  }
  return out;
}

void set_slot(KdaState& kda, int64_t n, const KdaState& value) {
  if (!kda.recurrent.defined()) return;
  const auto to = kda.tensors();
  const auto from = value.tensors();
  for (size_t i = 0; i < to.size(); ++i) to[i]->narrow(0, n, 1).copy_(*from[i]);
}

int64_t bytes_of(const KdaState& kda) {
  int64_t total = 0;
  for (const at::Tensor* t : kda.tensors()) total += t->defined() ? static_cast<int64_t>(t->nbytes()) : 0;
  return total;
}

// As bytes where they are fp8: rows are only moved here.
at::Tensor flat_rows(const LayerState& layer) {
  const at::Tensor rows = layer.pages.view({-1, layer.pages.size(2)});
  return rows.element_size() == 1 ? rows.view(at::kByte) : rows;
}

// Where the rows of `length` tokens on these pages lie among a layer's flattened rows, [length] int64.
at::Tensor row_index(const PageList& pages, int64_t length) {
  at::Tensor index = at::empty({length}, at::kLong);
  auto* out = index.data_ptr<int64_t>();
  for (int64_t t = 0; t < length; ++t) out[t] = pages[t / kLatentPage] * kLatentPage + t % kLatentPage;
  return index;
}

}  // namespace

PageList::PageList(const PageList& other) : pool_(other.pool_), pages_(other.pages_) {
  for (const int32_t page : pages_) ++pool_->holders[page];
}

PageList& PageList::operator=(PageList other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(pages_, other.pages_);
  return *this;
}

void PageList::grow() {
  const int32_t page = pool_->free.back();
  pool_->free.pop_back();
  pool_->holders[page] = 1;
  pages_.push_back(page);
}

void PageList::drop_last() {
  const int32_t page = pages_.back();
  pages_.pop_back();
  if (--pool_->holders[page] == 0) pool_->free.push_back(page);
}

void PageList::clear() {
  while (!pages_.empty()) drop_last();
}

int64_t StateSnapshot::bytes() const {
  int64_t total = 0;
  for (const KdaState& layer : kda) total += bytes_of(layer);
  return total;
}

ModelState::ModelState(const ModelConfig& config, const Size& size, at::Device device, at::ScalarType dtype)
    : pool_(std::make_shared<PagePool>()),
      layers_(config.layers),
      grows_(size.pages == 0),
      fp8_latents_(size.fp8_latents) {
  const int64_t H = config.kda.heads, K = config.kda.head_dim;
  const auto options = at::TensorOptions().device(device).dtype(dtype);
  for (int64_t i = 0; i < config.layers; ++i) {
    LayerState& layer = layers_[i];
    if (!config.kda_layer[i]) {
      layer.pages = at::empty({0, kLatentPage, config.mla.kv_lora_rank + config.mla.rope_dim},
                              options.dtype(size.fp8_latents ? kFp8Latent : dtype));
      continue;
    }
    for (at::Tensor* t : {&layer.kda.conv_q, &layer.kda.conv_k, &layer.kda.conv_v})
      *t = at::zeros({size.sequences, H * K, config.kda.conv_kernel - 1}, options);
    layer.kda.recurrent = at::zeros({size.sequences, H, K, K}, options.dtype(at::kFloat));
  }
  sequences_.assign(size.sequences, SequenceState{.length = 0, .pages = PageList(pool_)});
  grow(size.pages);
}

void ModelState::grow(int64_t pages) {
  const int64_t before = this->pages();
  if (pages <= before) return;
  for (LayerState& layer : layers_) {
    if (!layer.pages.defined()) continue;
    auto sizes = layer.pages.sizes().vec();
    sizes[0] = pages;
    at::Tensor grown = at::empty(sizes, layer.pages.options());
    if (before > 0) grown.narrow(0, 0, before).copy_(layer.pages);
    layer.pages = grown;
  }
  pool_->holders.resize(pages, 0);
  for (int64_t page = pages; page-- > before;) pool_->free.push_back(static_cast<int32_t>(page));
}

bool ModelState::reserve(int64_t n, int64_t tokens) {
  SequenceState& sequence = sequences_[n];
  const int64_t missing = pages_for(sequence.length + tokens) - sequence.pages.size();
  if (missing > free_pages()) {
    if (!grows_) return false;
    grow(std::max(2 * pages(), pages() + missing));
  }
  for (int64_t i = 0; i < missing; ++i) sequence.pages.grow();
  return true;
}

void ModelState::clear(int64_t n) {
  sequences_[n].length = 0;
  sequences_[n].pages.clear();
  for (LayerState& layer : layers_) {
    for (at::Tensor* t : layer.kda.tensors()) {
      if (t->defined()) t->narrow(0, n, 1).zero_();
    }
  }
}

std::vector<KdaState> ModelState::copy_kda(int64_t n) const {
  std::vector<KdaState> out;
  for (const LayerState& layer : layers_) out.push_back(copy_slot(layer.kda, n));
  return out;
}

void ModelState::rewind(int64_t n, const std::vector<KdaState>& kda, int64_t tokens) {
  for (size_t i = 0; i < layers_.size(); ++i) set_slot(layers_[i].kda, n, kda[i]);
  sequences_[n].length -= tokens;
}

// The last page of `pages`, if it is not full, becomes a copy of its own.
void ModelState::own_last_page(PageList& pages, int64_t length) {
  while (pages.size() > pages_for(length)) pages.drop_last();
  if (length % kLatentPage == 0) return;
  if (free_pages() == 0 && grows_) grow(2 * this->pages());
  check(free_pages() > 0, "state: no free page for the copy of a page that is not full");
  const int32_t shared = pages[pages.size() - 1];
  pages.drop_last();
  pages.grow();
  const int32_t own = pages[pages.size() - 1];
  for (LayerState& layer : layers_) {
    if (layer.pages.defined()) layer.pages[own].copy_(layer.pages[shared]);
  }
}

StateSnapshot ModelState::snapshot(int64_t n) {
  const SequenceState& sequence = sequences_[n];
  StateSnapshot out{.length = sequence.length, .kda = {}, .pages = sequence.pages};
  own_last_page(out.pages, out.length);
  for (const LayerState& layer : layers_) out.kda.push_back(copy_slot(layer.kda, n));
  return out;
}

void ModelState::restore(int64_t n, const StateSnapshot& snapshot) {
  SequenceState& sequence = sequences_[n];
  sequence.pages = snapshot.pages;
  sequence.length = snapshot.length;
  own_last_page(sequence.pages, sequence.length);
  for (size_t i = 0; i < layers_.size(); ++i) set_slot(layers_[i].kda, n, snapshot.kda[i]);
}

int64_t SwappedState::bytes() const {
  int64_t total = 0;
  for (const KdaState& layer : kda) total += bytes_of(layer);
  for (const at::Tensor& layer : rows) total += layer.defined() ? static_cast<int64_t>(layer.nbytes()) : 0;
  return total;
}

std::vector<at::Tensor> ModelState::copy_rows(const PageList& pages, int64_t length) const {
  const at::Tensor index = row_index(pages, length);
  std::vector<at::Tensor> out;
  for (const LayerState& layer : layers_) {
    out.push_back(layer.pages.defined()
                      ? flat_rows(layer).index_select(0, index.to(layer.pages.device())).to(at::kCPU)
                      : at::Tensor());
  }
  return out;
}

SwappedState ModelState::swap_out(int64_t n) {
  const SequenceState& sequence = sequences_[n];
  SwappedState out{.length = sequence.length, .kda = {}, .rows = copy_rows(sequence.pages, sequence.length)};
  for (const LayerState& layer : layers_) out.kda.push_back(copy_slot(layer.kda, n, at::kCPU));
  clear(n);
  return out;
}

SwappedState ModelState::copy_to_host(const StateSnapshot& snapshot) const {
  SwappedState out{.length = snapshot.length, .kda = {}, .rows = copy_rows(snapshot.pages, snapshot.length)};
  for (const KdaState& layer : snapshot.kda)
    out.kda.push_back(layer.recurrent.defined() ? copy_slot(layer, 0, at::kCPU) : KdaState{});
  return out;
}

int64_t ModelState::host_bytes(const StateSnapshot& snapshot) const {
  int64_t total = snapshot.bytes();
  for (const LayerState& layer : layers_) {
    if (layer.pages.defined())
      total += snapshot.length * layer.pages.size(2) * static_cast<int64_t>(layer.pages.element_size());
  }
  return total;
}

bool ModelState::swap_in(int64_t n, const SwappedState& swapped) {
  clear(n);
  if (!reserve(n, swapped.length)) return false;
  SequenceState& sequence = sequences_[n];
  sequence.length = swapped.length;
  const at::Tensor index = row_index(sequence.pages, sequence.length);
  for (size_t i = 0; i < layers_.size(); ++i) {
    LayerState& layer = layers_[i];
    set_slot(layer.kda, n, swapped.kda[i]);
    if (layer.pages.defined()) {
      const at::Device device = layer.pages.device();
      flat_rows(layer).index_copy_(0, index.to(device), swapped.rows[i].to(device));
    }
  }
  return true;
}

int64_t ModelState::bytes() const {
  int64_t total = 0;
  for (const LayerState& layer : layers_) {
    total += bytes_of(layer.kda);
    if (layer.pages.defined()) total += static_cast<int64_t>(layer.pages.nbytes());
  }
  return total;
}

int64_t ModelState::slot_bytes(const ModelConfig& config, at::ScalarType dtype) {
  const KdaConfig& kda = config.kda;
  const int64_t layers = std::count(config.kda_layer.begin(), config.kda_layer.end(), true);
  const int64_t conv = 3 * kda.heads * kda.head_dim * (kda.conv_kernel - 1);
  const int64_t recurrent = kda.heads * kda.head_dim * kda.head_dim;
  return layers * (conv * static_cast<int64_t>(c10::elementSize(dtype)) + recurrent * 4);
}

int64_t ModelState::page_bytes(const ModelConfig& config, at::ScalarType dtype) {
  const int64_t layers = std::count(config.kda_layer.begin(), config.kda_layer.end(), false);
  const int64_t width = config.mla.kv_lora_rank + config.mla.rope_dim;
  return layers * kLatentPage * width * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace godwit
