#include "godwit/model/convert.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "godwit/base/check.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/io/finite.h"
#include "godwit/io/mxfp4.h"
#include "godwit/model/checkpoint.h"
#include "godwit/model/convert_config.h"
#include "godwit/model/convert_source.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using at::Tensor;

constexpr int64_t kBlock = 1 << 22;  // elements converted at a time: a few buffers of 16 MiB

io::Bytes bytes_of(const Tensor& t) {
  return {static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()};
}

std::span<const uint8_t> as_u8(io::Bytes bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

std::span<uint8_t> u8_of(Tensor& t) {
  return {t.data_ptr<uint8_t>(), static_cast<size_t>(t.numel())};
}

// Stored elements as an own tensor of the wanted type.
Tensor read_floats(io::Bytes bytes, io::Dtype dtype, at::ScalarType to) {
  const int64_t n = static_cast<int64_t>(bytes.size()) / io::dtype_size(dtype);
  Tensor own = at::empty({n}, io::to_scalar_type(dtype));  // the bytes of a file need not be aligned
  std::memcpy(own.mutable_data_ptr(), bytes.data(), bytes.size());
  return own.to(to);
}

// Writes one piece in the form of its target. The buffers live only as long as a block.
class PieceWriter {
 public:
  PieceWriter(io::CheckpointWriter& writer, const ConvertSource* scales) : writer_(writer), scales_(scales) {}

  void write(const StoredPiece& from, const StoredParam& source, const StoredParam& target, int64_t piece,
             const std::string& where) const {
    check_values(from, source, target, piece, where);
    if (is_a_log(target.info)) return a_log(from, target, where);
    if (source.packed && target.packed) {
      writer_.append(target.name(piece, StoredPart::kPacked), from.bytes);
      writer_.append(target.name(piece, StoredPart::kScale), from.scales);
      return;
    }
    if (target.packed) return quantise(from, target, piece);
    const std::string name = target.name(piece, StoredPart::kWeight);
    if (source.packed) return dequantise(from, target, name);
    if (from.dtype == target.dtype) return writer_.append(name, from.bytes);
    const auto step = static_cast<size_t>(kBlock * io::dtype_size(from.dtype));
    for (size_t at = 0; at < from.bytes.size(); at += step) {
      const io::Bytes block = from.bytes.subspan(at, std::min(step, from.bytes.size() - at));
      writer_.append(name, bytes_of(read_floats(block, from.dtype, io::to_scalar_type(target.dtype))));
    }
  }

 private:
  // What is not finite, or would not be in the type that it gets, is nowhere copied through.
  static void check_values(const StoredPiece& from, const StoredParam& source, const StoredParam& target,
                           int64_t piece, const std::string& where) {
    const std::string name =
        where + ": " + source.name(piece, source.packed ? StoredPart::kPacked : StoredPart::kWeight);
    if (source.packed) {
      return io::check_finite(io::find_not_finite_mxfp4(as_u8(from.bytes), as_u8(from.scales)), name,
                              source.shape, "MXFP4");
    }
    const double limit = target.packed ? io::kMxfp4Limit : io::finite_limit(target.dtype);
    io::check_finite(io::find_not_finite(from.bytes, from.dtype, limit), name, source.shape,
                     target.packed ? "MXFP4" : io::dtype_name(target.dtype));
  }

  // [heads], [1, 1, heads, 1] or zero-padded, to the form of the target.
  void a_log(const StoredPiece& from, const StoredParam& target, const std::string& where) const {
    const int64_t heads = target.info.shape[0];
    const Tensor all = read_floats(from.bytes, from.dtype, at::kFloat);
    check(all.slice(0, heads).eq(0).all().item<bool>(),
          "{}: {}: {} of {} entries are used, the rest must be 0", where, target.info.name, heads,
          all.numel());
    const Tensor used = all.slice(0, 0, heads);
    const int64_t size = c10::multiply_integers(target.shape);
    writer_.append(target.info.name, bytes_of(at::constant_pad_nd(used, {0, size - heads}).contiguous()));
  }

  void dequantise(const StoredPiece& from, const StoredParam& target, const std::string& name) const {
    const int64_t n = static_cast<int64_t>(from.bytes.size()) * 2;
    for (int64_t at = 0; at < n; at += kBlock) {
      const int64_t count = std::min(kBlock, n - at);
      Tensor block = at::empty({count}, at::kFloat);
      io::mxfp4_dequantize(as_u8(from.bytes.subspan(at / 2, count / 2)),
                           as_u8(from.scales.subspan(at / io::kMxfp4Group, count / io::kMxfp4Group)),
                           {block.data_ptr<float>(), static_cast<size_t>(count)});
      writer_.append(name, bytes_of(block.to(io::to_scalar_type(target.dtype))));
    }
  }

  void quantise(const StoredPiece& from, const StoredParam& target, int64_t piece) const {
    const int64_t n = static_cast<int64_t>(from.bytes.size()) / io::dtype_size(from.dtype);
    StoredPiece given;
    if (scales_) given = scales_->read(param_of_scales(target), piece);
    for (int64_t at = 0; at < n; at += kBlock) {
      const int64_t count = std::min(kBlock, n - at);
      const auto size = static_cast<size_t>(io::dtype_size(from.dtype));
      const Tensor block = read_floats(from.bytes.subspan(at * size, count * size), from.dtype, at::kFloat);
      const std::span<const float> values(block.const_data_ptr<float>(), static_cast<size_t>(count));
      Tensor packed = at::empty({count / 2}, at::kByte);
      Tensor scales = at::empty({count / io::kMxfp4Group}, at::kByte);
      if (scales_) {
        std::memcpy(scales.mutable_data_ptr(), given.scales.data() + at / io::kMxfp4Group, scales.nbytes());
        io::mxfp4_quantize_with_scales(values, u8_of(scales), u8_of(packed));
      } else {
        io::mxfp4_quantize(values, u8_of(packed), u8_of(scales), io::Mxfp4ScaleRule::kCompressedTensors);
      }
      writer_.append(target.name(piece, StoredPart::kPacked), bytes_of(packed));
      writer_.append(target.name(piece, StoredPart::kScale), bytes_of(scales));
    }
  }

  const StoredParam& param_of_scales(const StoredParam& target) const {
    const auto found = std::ranges::find_if(scales_->params(), [&](const StoredParam& param) {
      return param.info.name.ends_with(target.info.name) || target.info.name.ends_with(param.info.name);
    });
    check(found != scales_->params().end() && found->packed && found->info.shape == target.info.shape,
          "{}: no MXFP4 scales for {} {}", scales_->path(), target.info.name,
          io::shape_text(target.info.shape));
    return *found;
  }

  io::CheckpointWriter& writer_;
  const ConvertSource* scales_;
};

// The parameters of OUT, one for each of IN (the vision tower's only where they have a place).
std::vector<StoredParam> target_params(const ConvertSource& source, const ModelConfig& config,
                                       const ConvertOptions& options) {
  const bool packed = options.dtype == ConvertDtype::kMxfp4;
  const io::Dtype dtype = options.dtype == ConvertDtype::kF32 ? io::Dtype::F32 : io::Dtype::BF16;
  std::vector<StoredParam> target = stored_params(config, dtype, packed);
  target.resize(std::min(target.size(), source.params().size()));
  if (options.dtype != ConvertDtype::kAsStored) return target;
  for (size_t p = 0; p < target.size(); ++p) {
    const StoredParam& from = source.params()[p];
    target[p].packed = from.packed;
    if (!target[p].info.keep_fp32) target[p].dtype = from.dtype;
  }
  return target;
}

ModelConfig target_config(const ConvertSource& source, const ConvertOptions& options) {
  ModelConfig config = source.config();
  if (!options.model_type || *options.model_type == config.model_type) return config;
  check(*options.model_type == "kimi_k3" || *options.model_type == "kimi_linear",
        "the layout must be \"kimi_k3\" or \"kimi_linear\", got \"{}\"", *options.model_type);
  config.model_type = *options.model_type;
  if (config.model_type == "kimi_linear") {  // it has no place for one
    config.vision.reset();
    config.media_id = -1;
  }
  return config;
}

// OUT must not lie in IN: it would be a part of what is read, and of what the next conversion copies.
void refuse_inside(const std::string& in, const std::string& out) {
  const fs::path outer = fs::weakly_canonical(in), inner = fs::weakly_canonical(out);
  const auto [end, ignored] = std::ranges::mismatch(outer, inner);
  check(!fs::is_directory(outer) || end != outer.end(), "{} lies in {}: write somewhere else", out, in);
}

// Scales that nothing would take.
void check_scales_used(const ConvertOptions& options, const ConvertSource& source,
                       const std::vector<StoredParam>& target) {
  if (!options.scales_from) return;
  check(options.dtype == ConvertDtype::kMxfp4, "--scales-from: nothing is packed without --dtype mxfp4");
  bool any = false;
  for (size_t p = 0; p < target.size(); ++p) any |= target[p].packed && !source.params()[p].packed;
  check(any, "--scales-from: {} has no experts to pack: {}", source.path(),
        std::ranges::any_of(source.params(), &StoredParam::packed) ? "they are MXFP4 and keep their scales"
                                                                   : "every layer is dense");
}

// Pieces of one file of OUT in the order of the files of IN.
std::vector<StoredNames::Place> reading_order(const io::ShardPlan& shard, const StoredNames& names,
                                              const ConvertSource& source) {
  std::vector<std::pair<uint32_t, StoredNames::Place>> pieces;
  for (const io::TensorSpec& spec : shard.tensors) {
    const StoredNames::Place place = *names.find(spec.name);
    if (place.part == StoredPart::kScale) continue;  // goes with its values
    pieces.emplace_back(source.file_of(source.params()[place.param], place.piece), place);
  }
  std::ranges::stable_sort(pieces, {}, [](const auto& piece) { return piece.first; });
  std::vector<StoredNames::Place> out;
  for (const auto& piece : pieces) out.push_back(piece.second);
  return out;
}

uint64_t piece_bytes(const StoredParam& param) {
  uint64_t bytes = 0;
  const auto add = [&](StoredPart part) {
    bytes += io::checked_tensor_bytes(param.spec(0, part), "convert");
  };
  if (!param.packed) add(StoredPart::kWeight);
  if (param.packed) add(StoredPart::kPacked), add(StoredPart::kScale);
  return bytes;
}

}  // namespace

ConvertSummary convert_checkpoint(const std::string& in, const std::string& out,
                                  const ConvertOptions& options) {
  const at::NoGradGuard no_grad;
  refuse_inside(in, out);
  io::AtomicDirectory directory(out);
  const auto source = open_convert_source(in);
  const auto scales = options.scales_from ? open_convert_source(*options.scales_from) : nullptr;
  const ModelConfig config = target_config(*source, options);
  const std::vector<StoredParam> params = target_params(*source, config, options);
  check_scales_used(options, *source, params);
  const std::vector<io::ShardPlan> plan = plan_files(config, params, options.shard_bytes);

  ConvertSummary summary{.tensors_in = source->tensors(), .files = static_cast<int64_t>(plan.size())};
  summary.left_out = static_cast<int64_t>(source->params().size() - params.size());
  io::Dtype dtype = params.front().dtype;
  for (const StoredParam& param : params) {
    summary.packed |= param.packed;
    summary.vision += param.vision ? 1 : 0;
    summary.bytes += piece_bytes(param) * static_cast<uint64_t>(param.pieces());
  }
  for (const io::ShardPlan& shard : plan) summary.tensors_out += static_cast<int64_t>(shard.tensors.size());
  const ConvertedConfig written = converted_config(source->json(), config, dtype, summary.packed);
  summary.keys_left_out = written.left_out;

  io::CheckpointWriter writer(directory.temporary(), plan);
  const PieceWriter pieces(writer, scales.get());
  const StoredNames names(params);
  uint64_t done = 0;
  for (const io::ShardPlan& shard : plan) {
    for (const StoredNames::Place& place : reading_order(shard, names, *source)) {
      const StoredParam& from = source->params()[place.param];
      pieces.write(source->read(from, place.piece), from, params[place.param], place.piece, in);
      done += piece_bytes(params[place.param]);
      if (options.progress) options.progress(done, summary.bytes);
    }
  }
  writer.commit();
  io::write_file_atomic(directory.temporary() / "config.json", written.json.dump(2) + "\n");
  for (const fs::path& file : source->other_files())
    fs::copy_file(file, directory.temporary() / file.filename());
  directory.commit();
  return summary;
}

}  // namespace godwit
