#include "godwit/text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "godwit/base/check.h"
#include "godwit/text/pretokenize.h"
#include "tests/text/tokenizer_fixture.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Ids = std::vector<int32_t>;

TEST(Tokenizer, EncodesAsTiktoken) {
  for (const auto& c : fixture()["encode"]) {
    EXPECT_EQ(fixture_tokenizer().encode(c["text"].get_ref<const std::string&>()), c["ids"].get<Ids>())
        << c["text"];
  }
}

TEST(Tokenizer, EncodesLongRunsAndRandomUnicodeAsTiktoken) {
  for (const auto& c : fixture()["encode_long"]) {
    const std::string text = rule_text(c);
    const Ids ids = fixture_tokenizer().encode(text);
    EXPECT_EQ(ids.size(), c["count"].get<size_t>()) << c;
    EXPECT_EQ(fnv(ids), c["ids_fnv"].get<std::string>()) << c;
    EXPECT_TRUE(fixture_tokenizer().decode(ids) == text) << c;
  }
}

TEST(Tokenizer, CutsLongTextsAsTheReleasedTokenizer) {
  for (const auto& c : fixture()["cut"]) {
    const Ids ids = fixture_tokenizer().encode(rule_text(c), {.cut_long = true});
    EXPECT_EQ(ids.size(), c["count"].get<size_t>()) << c;
    EXPECT_EQ(fnv(ids), c["ids_fnv"].get<std::string>()) << c;
  }
}

TEST(Tokenizer, InvalidBytesAreKeptOrReplacedAsAsked) {
  const Tokenizer& tokenizer = fixture_tokenizer();
  for (const auto& c : fixture()["bytes"]) {
    const std::string bytes = from_hex(c["bytes"]);
    EXPECT_EQ(tokenizer.encode(bytes, {.invalid = InvalidUtf8::kReplace}), c["replace"].get<Ids>()) << c;
    EXPECT_EQ(tokenizer.encode(bytes, {.invalid = InvalidUtf8::kTiktoken}), c["tiktoken"].get<Ids>()) << c;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(bytes)), bytes) << c;
  }
}

TEST(Tokenizer, DecodesAsTiktoken) {
  for (const auto& c : fixture()["decode"]) {
    EXPECT_EQ(fixture_tokenizer().decode(c["ids"].get<Ids>()), from_hex(c["bytes"])) << c;
  }
}

TEST(Tokenizer, DecodeOfEncodeIsTheIdentityOnBytes) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    const std::string bytes = random_bytes(seed, seed % 100);
    for (const auto invalid : {InvalidUtf8::kKeep, InvalidUtf8::kTiktoken}) {
      ASSERT_EQ(fixture_tokenizer().decode(fixture_tokenizer().encode(bytes, {.invalid = invalid})), bytes)
          << seed;
    }
  }
}

// The encoder remembers and fetches ahead; neither may show. Each piece alone must give the same ids.
TEST(Tokenizer, WholeTextIsThePiecesOneByOne) {
  const std::string text = pool_text(20, 0, 3000);
  Ids ids;
  for (Pretokenizer pieces(text); !pieces.done();)
    fixture_tokenizer().encode_append(std::string(pieces.next()), ids);
  EXPECT_EQ(fixture_tokenizer().encode(text), ids);
}

TEST(Tokenizer, TwoVocabulariesInOneThreadDoNotMix) {
  std::vector<std::string> bytes_only;
  for (int byte = 0; byte < 256; ++byte) bytes_only.emplace_back(1, static_cast<char>(255 - byte));
  const Tokenizer other = Tokenizer::from_ranks(bytes_only);
  const std::string text = "unhallowed qqzzq unhallowed qqzzq";
  const Ids first = fixture_tokenizer().encode(text);
  EXPECT_EQ(other.encode(text).size(), text.size());
  EXPECT_EQ(other.encode("a"), Ids{255 - 'a'});
  EXPECT_EQ(fixture_tokenizer().encode(text), first);
}

TEST(Tokenizer, ThreadsAgree) {
  const std::string text = pool_text(21, 0, 20'000);
  const Ids expected = fixture_tokenizer().encode(text);
  std::vector<std::thread> threads;
  std::vector<Ids> results(4);
  for (Ids& result : results) threads.emplace_back([&] { result = fixture_tokenizer().encode(text); });
  for (std::thread& thread : threads) thread.join();
  for (const Ids& result : results) EXPECT_EQ(result, expected);
}

TEST(Tokenizer, SpecialsComeOnlyWhereTheyAreAllowed) {
  const Tokenizer& tokenizer = fixture_tokenizer();
  for (const auto& c : fixture()["specials"]) {
    const auto& text = c["text"].get_ref<const std::string&>();
    EXPECT_EQ(tokenizer.encode_with_specials(text), c["ids"].get<Ids>()) << c;
    EXPECT_EQ(tokenizer.encode(text), c["ordinary"].get<Ids>()) << c;
  }
  for (int32_t id = tokenizer.ranks(); id < tokenizer.vocab_size(); ++id) {
    const std::string name(tokenizer.token_bytes(id));
    EXPECT_EQ(tokenizer.encode_with_specials(name), Ids{id});
    for (const int32_t ordinary : tokenizer.encode("x" + name + "y", {.cut_long = true})) {
      EXPECT_FALSE(tokenizer.is_special(ordinary)) << name;
    }
    EXPECT_EQ(tokenizer.decode(Ids{id}), name);
    EXPECT_EQ(tokenizer.decode(Ids{id}, /*skip_specials=*/true), "");
  }
}

TEST(Tokenizer, SpecialsSitWhereK3HasThem) {
  const Tokenizer& tokenizer = fixture_tokenizer();
  EXPECT_EQ(tokenizer.vocab_size(), 2256);
  const std::pair<std::string_view, int> k3[] = {{"[BOS]", 163584},
                                                 {"[EOS]", 163585},
                                                 {"<|end_of_msg|>", 163586},
                                                 {"<|open|>", 163587},
                                                 {"<|close|>", 163588},
                                                 {"<|sep|>", 163589},
                                                 {"[start_header_id]", 163590},
                                                 {"[end_header_id]", 163591},
                                                 {"[EOT]", 163593},
                                                 {"<|media_begin|>", 163602},
                                                 {"<|media_content|>", 163603},
                                                 {"<|media_end|>", 163604},
                                                 {"<|media_pad|>", 163605},
                                                 {"<osagent_mode>", 163649},
                                                 {"[UNK]", 163838},
                                                 {"[PAD]", 163839}};
  for (const auto& [name, id] : k3) EXPECT_EQ(tokenizer.special_id(name), id - 163584 + tokenizer.ranks());
  EXPECT_EQ(tokenizer.token_bytes(2008), "<|reserved_token_2008|>");  // the number is the id
  EXPECT_EQ(tokenizer.find_special("<|im_end|>"), std::nullopt);
  EXPECT_THAT([&] { tokenizer.special_id("<|im_end|>"); }, ThrowsMessage<Error>(HasSubstr("'<|im_end|>'")));
}

TEST(Tokenizer, IdsOutsideTheVocabularyAreErrors) {
  for (const int32_t id : {-1, 2256, INT32_MAX, INT32_MIN}) {
    EXPECT_THAT(
        [&] {
          fixture_tokenizer().decode(Ids{5, id});
        },
        ThrowsMessage<Error>(HasSubstr(fmt::format("token id {} is outside the vocabulary of 2256", id))));
  }
}

// No run of any kind may take quadratic time: the limit is a hundred times what is needed.
TEST(Tokenizer, MegabyteRunsAreLinear) {
  const auto start = std::chrono::steady_clock::now();
  for (const char* unit :
       {"a", " ", "A", "-", "\n", "\u0301", "\u0301A", "A\u0301A", " \n", "中", "\xff", "'", "'s"}) {
    std::string text;
    while (text.size() < 1'000'000) text += unit;
    for (const char* end : {"", "x", "."}) EXPECT_FALSE(fixture_tokenizer().encode(text + end).empty());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(3));
}

class TokenizerFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(::testing::TempDir()) / fmt::format("godwit-tokenizer-{}", ::getpid());
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  void expect_fault(const std::string& message) {
    EXPECT_THAT([&] { Tokenizer::load(dir_.string()); }, ThrowsMessage<Error>(HasSubstr(message)));
  }
  void copy(const char* name) { fs::copy(fs::path(kFixture) / name, dir_ / name); }
  void write_config(const std::string& text) { write_file((dir_ / "tokenizer_config.json").string(), text); }
  fs::path dir_;
};

TEST_F(TokenizerFiles, SaveAndLoadAreInverse) {
  const std::string out = (dir_ / "new" / "directory").string();
  fixture_tokenizer().save(out, /*model_max_length=*/4096);
  EXPECT_EQ(std::distance(fs::directory_iterator(out), fs::directory_iterator()), 2);
  EXPECT_EQ(read_file(out + "/tiktoken.model"), read_file(kFixture + "/tiktoken.model"));
  EXPECT_EQ(nlohmann::json::parse(read_file(out + "/tokenizer_config.json"))["model_max_length"], 4096);
  for (const std::string& path : {out, out + "/tiktoken.model"}) {
    const Tokenizer loaded = Tokenizer::load(path);
    ASSERT_EQ(loaded.vocab_size(), fixture_tokenizer().vocab_size());
    for (int32_t id = 0; id < loaded.vocab_size(); ++id) {
      ASSERT_EQ(loaded.token_bytes(id), fixture_tokenizer().token_bytes(id));
    }
  }
}

TEST_F(TokenizerFiles, NamesOfSpecialsComeFromTheConfiguration) {
  copy("tiktoken.model");
  write_config(R"({"added_tokens_decoder": {"2002": {"content": "<|im_end|>"}}})");
  const Tokenizer tokenizer = Tokenizer::load(dir_.string());
  EXPECT_EQ(tokenizer.special_id("<|im_end|>"), 2002);
  EXPECT_EQ(tokenizer.special_id("<|reserved_token_2000|>"), 2000);
  EXPECT_EQ(tokenizer.find_special("[BOS]"), std::nullopt);
  write_config("{}");
  EXPECT_EQ(Tokenizer::load(dir_.string()).special_id("[BOS]"), 2000);
}

TEST_F(TokenizerFiles, FaultsNameFileAndPlace) {
  expect_fault("tiktoken.model: cannot open: No such file");
  EXPECT_THAT([&] { Tokenizer::load((dir_ / "absent").string()); },
              ThrowsMessage<Error>(HasSubstr("absent: cannot open")));
  write_file((dir_ / "tiktoken.model").string(), "");
  expect_fault("tiktoken.model: the file is empty");
  write_file((dir_ / "tiktoken.model").string(), "AA== 0\n!\n");
  expect_fault("tiktoken.model:2: expected 'base64 rank'");
  fs::remove(dir_ / "tiktoken.model");
  copy("tiktoken.model");
  write_config("{\n\"a\": ]");
  expect_fault("tokenizer_config.json: invalid JSON");
  expect_fault("line 2, column 6");
  write_config(R"({"added_tokens_decoder": 3})");
  expect_fault("added_tokens_decoder: expected an object");
  write_config(R"({"added_tokens_decoder": {"x": {}}})");
  expect_fault("added_tokens_decoder: 'x' is not a token id");
  write_config(R"({"added_tokens_decoder": {"2001": {"text": ""}}})");
  expect_fault("added_tokens_decoder: 2001: expected an object with the token's text");
  write_config(R"({"added_tokens_decoder": {"2001": {"content": "<x>"}, "2002": {"content": "<x>"}}})");
  expect_fault("have the same name '<x>'");
}

// A rank file that lost whole lines is valid by itself; the configuration beside it shows it.
TEST_F(TokenizerFiles, RankFileCutAtALineIsFoundByTheConfiguration) {
  copy("tokenizer_config.json");
  const std::string ranks = read_file(kFixture + "/tiktoken.model");
  write_file((dir_ / "tiktoken.model").string(), ranks.substr(0, ranks.find(" 1499\n") + 6));
  expect_fault("is that file truncated?");
}

}  // namespace
}  // namespace godwit
