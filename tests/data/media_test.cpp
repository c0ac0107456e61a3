// Pictures in packed data: from JSON lines and archives to the patches and targets of a batch.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>

#include "godwit/base/file.h"
#include "godwit/data/loader.h"
#include "godwit/data/pack.h"
#include "godwit/data/tar.h"
#include "godwit/data/tokenizer.h"
#include "godwit/io/base64.h"
#include "godwit/io/image.h"
#include "godwit/io/video.h"
#include "tests/support/files.h"

namespace godwit::data {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

const std::string kPictures = GODWIT_FIXTURES "/images/";

Tokenizer bytes() {
  std::vector<std::string> ranks;
  for (int b = 0; b < 256; ++b) ranks.emplace_back(1, static_cast<char>(b));
  return Tokenizer::from_ranks(std::move(ranks));
}

// Limits that make the fixtures a few tokens each.
io::ImageProcessorConfig small_pictures() {
  return {.in_patch_limit = 16, .patch_limit_on_one_side = 4};
}

PackSummary pack(const ScratchDir& dir, const fs::path& input, double holdout = 0) {
  static const Tokenizer tokenizer = bytes();
  PackOptions options;
  options.inputs = {input};
  options.out = dir / "out";
  options.replace = true;
  options.holdout = holdout;
  options.processor = small_pictures();
  options.tokenizer = pack_tokenizer(tokenizer, options.processor);
  return pack_corpus(options);
}

PackSummary pack_lines(const ScratchDir& dir, const std::string& lines) {
  for (const char* name : {"rgb.png", "rgb_420.jpg", "lossy.webp"})
    put_file(dir / name, read_file(kPictures + name));
  put_file(dir / "in.jsonl", lines);
  return pack(dir, dir / "in.jsonl");
}

std::string image(const std::string& source) {
  return R"({"type": "image", "image": ")" + source + "\"}";
}
std::string text(const std::string& words) {
  return R"({"type": "text", "text": ")" + words + "\"}";
}

PackedBatch document(const TokenDataset& dataset, uint64_t number) {
  PackedBatch batch;
  batch.append(dataset, 0, {number, 0, dataset.document_tokens(number)});
  return batch;
}

// Letters as they are, special tokens as '|'.
std::string shown(const std::vector<int64_t>& ids) {
  std::string out;
  for (const int64_t id : ids) {
    if (id != kNoTarget) out += id < 256 ? static_cast<char>(id) : '|';
  }
  return out;
}

TEST(MediaPack, PicturesStandWhereTheyWere) {
  const ScratchDir dir;
  const PackSummary summary =
      pack_lines(dir, "{\"content\": [" + text("one ") + "," + image("rgb.png") + "," + text(" two") + "," +
                          image("rgb_420.jpg") + "]}\n{\"text\": \"plain\"}\n");
  EXPECT_EQ(summary.train.media, 2u);
  const TokenDataset dataset(dir / "out");
  dataset.verify();
  ASSERT_EQ(dataset.documents(), 2u);
  ASSERT_TRUE(dataset.has_media());
  EXPECT_EQ(dataset.processor(), small_pictures());
  const PackedBatch batch = document(dataset, 0);
  ASSERT_EQ(batch.media.size(), 2u);
  const int64_t pad = bytes().special_id(kMediaPad);
  EXPECT_EQ(std::ranges::count(batch.ids, pad), batch.media[0].count + batch.media[1].count);
  const std::string all = shown(batch.ids);
  const io::Image first = io::load_image(kPictures + "rgb.png");
  EXPECT_TRUE(all.starts_with("one |image " + std::to_string(first.width) + "x" +
                              std::to_string(first.height) + "|"));
  EXPECT_EQ(shown(batch.targets), "ne  two|");  // the text and the end; no word of a picture's prompt
  // The patches are the processor's.
  const auto expected = io::image_patches(io::prepare_image(first, small_pictures()), small_pictures());
  ASSERT_GE(batch.pixels.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_EQ(batch.values[i / (14 * 14) % 3][batch.pixels[i]], expected[i]) << i;
  EXPECT_TRUE(document(dataset, 1).media.empty());
}

TEST(MediaPack, AnAnswerAloneIsTrained) {
  const ScratchDir dir;
  pack_lines(dir,
             "{\"content\": [" + image("lossy.webp") + "," + text("what?") + "], \"answer\": \"dots\"}\n");
  const PackedBatch batch = document(TokenDataset(dir / "out"), 0);
  EXPECT_EQ(shown(batch.targets), "dots|");
}

TEST(MediaPack, ConversationsAndDataUrls) {
  const ScratchDir dir;
  const std::string file = read_file(kPictures + "tiny.png");
  // Base64 by hand: three bytes at a time.
  std::string code;
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < file.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (i + k < file.size() ? static_cast<unsigned char>(file[i + k]) : 0u);
    for (size_t k = 0; k < 4; ++k) code += i + k <= file.size() ? digits[bits >> (18 - 6 * k) & 63] : '=';
  }
  ASSERT_EQ(io::decode_data_url("data:image/png;base64," + code, "url"), file);
  pack_lines(
      dir,
      R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,)" +
          code + R"("}}, {"type": "text", "text": "what?"}]}, {"role": "assistant", "content": "a dot"}]})" +
          "\n");
  const PackedBatch batch = document(TokenDataset(dir / "out"), 0);
  ASSERT_EQ(batch.media.size(), 1u);
  EXPECT_EQ(batch.media[0], (MediaPiece{1, 2, 2, 0, 1}));
  EXPECT_NE(shown(batch.ids).find("|image 5x3||"), std::string::npos);
  EXPECT_NE(shown(batch.targets).find("a dot"), std::string::npos);
  EXPECT_EQ(shown(batch.targets).find("what?"), std::string::npos);
}

TEST(MediaPack, VideosInGroupsOfFourWithTheirTimes) {
  const ScratchDir dir;
  std::string frames;
  for (int i = 0; i < 6; ++i) frames += std::string(i ? "," : "") + "\"rgb.png\"";
  pack_lines(dir, "{\"content\": [{\"type\": \"video\", \"fps\": 2, \"video\": [" + frames +
                      "]}], \"answer\": \"x\"}\n");
  const PackedBatch batch = document(TokenDataset(dir / "out"), 0);
  ASSERT_EQ(batch.media.size(), 2u);
  EXPECT_EQ(batch.media[0].frames, 4);
  EXPECT_EQ(batch.media[1].frames, 2);
  EXPECT_TRUE(shown(batch.ids).starts_with("00:00:00.000|video "));
  EXPECT_NE(shown(batch.ids).find("|00:00:02.000|video "), std::string::npos);
  EXPECT_EQ(shown(batch.targets), "x|");
}

TEST(MediaPack, VideoFiles) {
  const ScratchDir dir;
  put_file(dir / "clip.mp4", read_file(kPictures + "animated/colours.mp4"));
  const std::string line =
      R"({"content": [{"type": "video", "fps": 2, "video": "clip.mp4"}], "answer": "x"})" + std::string("\n");
  if (!io::reads_video_files()) {
    expect_error([&] { pack_lines(dir, line); }, {"in.jsonl:1", "ffmpeg"});
    GTEST_SKIP() << "no ffmpeg libraries";
  }
  pack_lines(dir, line);
  const PackedBatch batch = document(TokenDataset(dir / "out"), 0);  // three seconds
  ASSERT_EQ(batch.media.size(), 2u);
  EXPECT_EQ(batch.media[0].frames + batch.media[1].frames, 6);
  EXPECT_TRUE(shown(batch.ids).starts_with("00:00:00.000|video 40x32|"));
}

// A cut through a picture leaves some of its vectors on each side.
TEST(MediaPack, CutsAnywhere) {
  const ScratchDir dir;
  pack_lines(dir, "{\"content\": [" + text("ab") + "," + image("rgb.png") + "," + text("cd") + "]}\n");
  const TokenDataset dataset(dir / "out");
  const PackedBatch whole = document(dataset, 0);
  const auto tokens = dataset.document_tokens(0);
  ASSERT_GT(whole.media[0].count, 1);
  for (uint64_t cut = 1; cut < tokens; ++cut) {
    PackedBatch two;
    two.append(dataset, 0, {0, 0, cut});
    two.append(dataset, 0, {0, cut, tokens - cut});
    EXPECT_EQ(two.ids, whole.ids);
    EXPECT_EQ(two.targets, whole.targets);
    int64_t vectors = 0;
    for (const MediaPiece& piece : two.media) {
      EXPECT_EQ(piece.first, vectors);
      vectors += piece.count;
    }
    EXPECT_EQ(vectors, whole.media[0].count);
  }
}

// ustar by hand.
std::string tar_member(const std::string& name, const std::string& body) {
  std::string header(512, '\0');
  header.replace(0, name.size(), name);
  header.replace(100, 7, "0000644");
  header.replace(124, 11, fmt::format("{:011o}", body.size()));
  header.replace(156, 1, "0");
  header.replace(257, 5, "ustar");
  header.replace(148, 8, "        ");
  uint32_t sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  header.replace(148, 7, fmt::format("{:06o}", sum) + '\0');
  return header + body + std::string((512 - body.size() % 512) % 512, '\0');
}

TEST(MediaPack, ArchivesOfSamples) {
  const ScratchDir dir;
  const std::string png = read_file(kPictures + "rgb.png"), jpeg = read_file(kPictures + "rgb_420.jpg");
  const std::string archive = tar_member("a/001.png", png) + tar_member("a/001.txt", "a caption") +
                              tar_member("a/002.0.jpg", jpeg) + tar_member("a/002.1.png", png) +
                              tar_member("a/002.json", "{\"content\": [" + image("1.png") + "," +
                                                           image("0.jpg") + "], \"answer\": \"both\"}") +
                              std::string(1024, '\0');
  put_file(dir / "x.tar", archive);
  EXPECT_EQ(pack(dir, dir / "x.tar").train.media, 3u);
  const TokenDataset dataset(dir / "out");
  ASSERT_EQ(dataset.documents(), 2u);
  EXPECT_EQ(shown(document(dataset, 0).targets), "a caption|");
  EXPECT_EQ(shown(document(dataset, 1).targets), "both|");
  for (const size_t size : {size_t{100}, size_t{700}, archive.size() / 2}) {
    put_file(dir / "x.tar", archive.substr(0, size));
    expect_error([&] { pack(dir, dir / "x.tar"); }, {"x.tar"});
  }
  put_file(dir / "none.tar", tar_member("b.json", "{\"label\": 3}"));
  testing::expect_error([&] { pack(dir, dir / "none.tar"); }, {"none.tar:b: expected an object with"});
  put_file(dir / "class.tar",
           tar_member("c.PNG", png) + tar_member("c.cls", "7") + tar_member("c.txt", "seven"));
  fs::remove_all(dir / "out");
  EXPECT_EQ(pack(dir, dir / "class.tar").train.media, 1u);
  put_file(dir / "deep.tar", tar_member("a.json", "{\"content\": " + std::string(100'000, '[') +
                                                      std::string(100'000, ']') + "}"));
  testing::expect_error([&] { pack(dir, dir / "deep.tar"); }, {"deep.tar:a: JSON nested deeper than 256"});
}

TEST(MediaPack, FaultsNameTheLine) {
  const ScratchDir dir;
  const auto fault = [&](const std::string& line, std::initializer_list<std::string> parts) {
    expect_error([&] { pack_lines(dir, "{\"text\": \"fine\"}\n" + line + "\n"); }, parts);
  };
  fault("{\"content\": [" + image("absent.png") + "]}", {"in.jsonl:2", "absent.png"});
  put_file(dir / "half.png", read_file(kPictures + "rgb.png").substr(0, 300));
  fault("{\"content\": [" + image("half.png") + "]}", {"in.jsonl:2", "content[0]: damaged PNG"});
  fault("{\"content\": [" + image("rgb.png\\u0000x") + "]}", {"in.jsonl:2", "no zero byte"});
  fault(R"({"content": [{"type": "video", "video": "x.mp4", "fps": "8"}]})",
        {"in.jsonl:2", "content[0].fps: expected a number"});
  fault("{\"content\": [" + image("data:image/png;base64,AAAA") + "]}",
        {"in.jsonl:2", "content[0]", "not a JPEG"});
  fault("{\"content\": [" + image("data:image/png;base64,A?") + "]}", {"in.jsonl:2", "not valid base64"});
  fault("{\"content\": [" + image("https://example.org/x.png") + "]}", {"in.jsonl:2", "is not fetched"});
  ASSERT_EQ(::mkfifo((dir / "pipe.png").c_str(), 0600), 0);  // would wait for a writer
  fault("{\"content\": [" + image("pipe.png") + "]}", {"in.jsonl:2", "pipe.png: is no regular file"});
  put_file(dir / "huge.png", "");
  fs::resize_file(dir / "huge.png", uintmax_t{40} << 30);  // takes no room
  fault("{\"content\": [" + image("huge.png") + "]}", {"in.jsonl:2", "huge.png: more than 1073741824 bytes"});
  fault(R"({"content": [{"type": "sound"}]})", {"in.jsonl:2", "content[0].type", "'sound'"});
  fault(R"({"content": [{"type": "video", "video": []}]})", {"in.jsonl:2", "no frames"});
  for (const char* fps : {"0", "-1", "1e-300", "1e300"})
    fault(fmt::format(R"({{"content": [{{"type": "video", "video": "x.mp4", "fps": {}}}]}})", fps),
          {"in.jsonl:2", "content[0].fps: must be 0.001 to 1000"});
  fault(R"({"content": "text"})", {"in.jsonl:2", "expected a list of parts"});
}

TEST(MediaPack, DamageIsFound) {
  const ScratchDir dir;
  pack_lines(dir, "{\"content\": [" + image("rgb.png") + "," + text("x") + "]}\n");
  const std::string path = dir / "out/media-00000.gwm";
  const std::string good = read_file(path);
  for (const size_t at : {size_t{3}, size_t{17}, good.size() - 30}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x55);
    put_file(path, bad);
    expect_error([&] { TokenDataset(dir / "out").verify(); }, {"media-00000.gwm"});
  }
  put_file(path, good.substr(0, good.size() - 8));
  expect_error([&] { TokenDataset(dir / "out"); }, {"media-00000.gwm", "truncated"});
}

}  // namespace
}  // namespace godwit::data
