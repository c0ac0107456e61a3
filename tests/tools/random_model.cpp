// godwit_random_model MODEL TOKENIZER DIR: a model directory with random weights, for tests of the server.
// MODEL is a preset, a config.json or a directory; "tiny" is small enough for tests of seconds.
#include <ATen/ATen.h>

#include <cstdio>
#include <filesystem>

#include "godwit/base/check.h"
#include "godwit/model/checkpoint.h"
#include "godwit/text/tokenizer.h"
#include "tests/model/tiny.h"

int main(int argc, char** argv) {
  using namespace godwit;
  if (argc != 4) return 2;
  try {
    const Tokenizer tokenizer = Tokenizer::load(argv[2]);
    ModelConfig config;
    if (std::string(argv[1]) == "tiny") {
      config = test::tiny_config();
      config.vocab_size = tokenizer.vocab_size();
      config.max_position = 4096;
      config.mla.nope_dim = 12;  // widths that our attention takes: multiples of 16
      config.mla.v_dim = 16;
      config.media_id = tokenizer.special_id(kMediaPad);
      config.vision = VisionConfig{.patch_size = 14,
                                   .pos_emb_height = 4,
                                   .pos_emb_width = 4,
                                   .layers = 2,
                                   .hidden = 16,
                                   .intermediate = 24,
                                   .heads = 2,
                                   .qkv_hidden = 16};
    } else {
      config = load_model_config(argv[1]);
    }
    check(tokenizer.vocab_size() <= config.vocab_size, "{}: more ids than the model has", argv[2]);
    std::filesystem::create_directories(argv[3]);
    ModelWeights weights = init_weights(config, /*seed=*/7, at::kCPU, at::kFloat);
    save_weights(config, weights, argv[3]);
    tokenizer.save(argv[3]);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
