#include "godwit/io/checkpoint_tensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/io/safetensors_fixture.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using testing::expect_error;
using testing::ScratchDir;

TEST(CheckpointTensor, EveryTypeThereAndBack) {
  const CheckpointDir python(fs::path(GODWIT_FIXTURES) / "safetensors/python_sharded");
  const ScratchDir dir;
  const auto specs = fixture_tensors();
  CheckpointWriter writer(dir.path(), plan_shards(specs, 20));
  for (const auto& spec : specs) {
    const at::Tensor view = tensor_view(python, spec.name);
    EXPECT_EQ(spec_of(spec.name, view), spec);
    write_tensor(writer, spec.name, view);
  }
  writer.commit();
  const CheckpointDir ours(dir.path());
  for (size_t i = 0; i < specs.size(); ++i)
    EXPECT_EQ(as_text(ours.at(specs[i].name).bytes), fixture_bytes(i)) << specs[i].name;
}

TEST(CheckpointTensor, ViewsShareTheMapAndOutliveTheCheckpoint) {
  const ScratchDir dir;
  save_tensors(dir / "model.safetensors", {{"a", at::arange(6, at::kFloat).reshape({2, 3})}});
  at::Tensor view;
  {
    const CheckpointDir checkpoint(dir.path());
    view = tensor_view(checkpoint, "a");
    EXPECT_EQ(view.const_data_ptr(), static_cast<const void*>(checkpoint.at("a").bytes.data()));
    const at::Tensor copy = read_tensor(checkpoint, "a", at::kFloat, Cast::kRefuse);
    EXPECT_NE(copy.const_data_ptr(), view.const_data_ptr());
  }
  EXPECT_TRUE(at::equal(view, at::arange(6, at::kFloat).reshape({2, 3})));
  view.fill_(7);  // a private page, never the file
  EXPECT_EQ(load_tensors(dir / "model.safetensors")[0].second.sum().item<float>(), 15.0f);
}

TEST(CheckpointTensor, UnalignedBytesAreCopied) {
  const ScratchDir dir;
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  const uint64_t length = header.size();
  const float value = 1.5f;
  std::string content(reinterpret_cast<const char*>(&length), 8);
  content += header + "x" + std::string(reinterpret_cast<const char*>(&value), 4);
  testing::put_file(dir / "model.safetensors", content);
  EXPECT_EQ(tensor_view(CheckpointDir(dir.path()), "b").item<float>(), 1.5f);
}

TEST(CheckpointTensor, StridedAndTransposedTensorsAreWrittenByValue) {
  const ScratchDir dir;
  const at::Tensor x = at::arange(12, at::kInt).reshape({3, 4});
  save_tensors(dir / "x.safetensors", {{"t", x.t()}, {"s", x.slice(1, 0, 4, 2)}}, {{"k", "v"}});
  const SafetensorsFile file(dir / "x.safetensors");
  EXPECT_TRUE(at::equal(tensor_view(file, file.at("t")), x.t()));
  EXPECT_TRUE(at::equal(tensor_view(file, file.at("s")), x.slice(1, 0, 4, 2)));
  EXPECT_EQ(file.metadata().at("k"), "v");
}

TEST(CheckpointTensor, CastsOnlyWhenAsked) {
  const ScratchDir dir;
  save_tensors(dir / "model.safetensors",
               {{"w", at::full({2}, 1.00390625, at::kFloat)}, {"n", at::ones({2}, at::kLong)}});
  const CheckpointDir checkpoint(dir.path());
  expect_error([&] { read_tensor(checkpoint, "w", at::kBFloat16, Cast::kRefuse); },
               {"'w' is Float, expected BFloat16"});
  EXPECT_EQ(read_tensor(checkpoint, "w", at::kBFloat16, Cast::kFloating).scalar_type(), at::kBFloat16);
  expect_error([&] { read_tensor(checkpoint, "n", at::kFloat, Cast::kFloating); },
               {"'n' is Long, expected Float"});
  at::Tensor out = at::zeros({3});
  expect_error([&] { read_into(checkpoint, "w", Cast::kRefuse, out); },
               {"'w' has the shape [2], expected [3]"});
  out = at::zeros({2}, at::kDouble);
  read_into(checkpoint, "w", Cast::kFloating, out);
  EXPECT_EQ(out[1].item<double>(), 1.00390625);
  expect_error([&] { from_scalar_type(at::kComplexFloat); }, {"ComplexFloat cannot be stored"});
}

TEST(CheckpointTensor, WriterChecksTypeAndShape) {
  const ScratchDir dir;
  const std::vector<TensorSpec> specs{{"w", Dtype::F32, {2}}};
  CheckpointWriter writer(dir.path(), plan_shards(specs, 100));
  expect_error([&] { write_tensor(writer, "w", at::zeros({3})); },
               {"'w' was announced as F32 [2], given Float [3]"});
  expect_error([&] { write_tensor(writer, "w", at::zeros({2}, at::kHalf)); }, {"given Half [2]"});
}

}  // namespace
}  // namespace godwit::io
