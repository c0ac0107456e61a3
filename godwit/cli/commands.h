// The subcommands: one struct of arguments and one function each. main.cpp alone knows the argument parser. A
// function returns the exit code, or throws Error for exit code 1.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace godwit::cli {

struct DeviceArgs {
  std::string device = "cpu";  // cpu or cuda
  int threads = 0;             // 0: one a core
};

struct PlanArgs {
  std::string model;
  int64_t context = 8192;
  int64_t batch = 1;  // sequences a decode step serves
  // A cluster, in units for people; 0: no cluster, an axis that is chosen.
  int64_t gpus = 0, tokens = 0;
  int64_t tp = 0, pp = 0, cp = 0, ep = 0, dp = 0;
  int64_t batch_tokens = 0;
  bool no_recompute = false;
  double mfu = 0.35, price = 3.0;
  double gpu_memory_gib = 139, gpu_bandwidth_tb = 4.8, gpu_tflops = 989;
  double link_gb = 350, network_gb = 50;
  int64_t gpus_per_host = 8;
  bool json = false;
};
int run_plan(const PlanArgs& args);

struct TokenizerTrainArgs {
  std::vector<std::string> inputs;
  std::string out;
  int64_t vocab_size = 4096;
};
int run_tokenizer_train(const TokenizerTrainArgs& args);

struct TokenizerUseArgs {
  std::string tokenizer;
  std::optional<std::string> input;  // encode: the text, decode: a JSON list; none reads stdin
  bool specials = false;             // encode: special tokens in the text count as such
};
int run_tokenizer_encode(const TokenizerUseArgs& args);
int run_tokenizer_decode(const TokenizerUseArgs& args);

struct DataPackArgs {
  std::vector<std::string> inputs;
  std::string out;
  std::string tokenizer;  // empty: every byte is a token
  double holdout = 0.0;
  bool replace = false;
};
int run_data_pack(const DataPackArgs& args);

struct DataDemosArgs {
  std::string environment;
  std::string options_json = "{}";
  std::string out;
  int64_t count = 1000;
  uint64_t seed = 0;
};
int run_data_demos(const DataDemosArgs& args);

// A model and how to draw from it.
struct ModelArgs {
  std::string model = {};
  int64_t max_tokens = 128;
  double temperature = 1.0;
  double top_p = 1.0;
  int64_t top_k = 0;
  uint64_t seed = 0;
  std::string dtype = {};    // f32 or bf16; empty: the checkpoint's
  std::string weights = {};  // how they are held: see weight_format_of
  int64_t draft_tokens = 0;
  DeviceArgs device = {};
};

struct GenerateArgs {
  ModelArgs model;
  std::string prompt;
  std::vector<std::string> images;
  bool json = false;
};
int run_generate(const GenerateArgs& args);

struct ChatArgs {
  ModelArgs model = {.max_tokens = 2048};
  std::string system;
  std::vector<std::string> images;  // of the first message
  bool no_thinking = false;
};
int run_chat(const ChatArgs& args);

struct ServeArgs {
  std::string model;
  std::string name;  // as clients see it; empty: the directory's
  std::string host = "127.0.0.1";
  int port = 8080;
  int64_t max_sequences = 16;
  int64_t max_context = 0;   // 0: the model's
  int64_t cache_tokens = 0;  // 0: max_sequences contexts of up to 8192 tokens
  int64_t max_waiting = 256;
  double max_wait = 300;         // seconds of a request in the queue; 0: no limit
  double shutdown_timeout = 10;  // seconds that running requests have to end after a signal
  std::vector<std::string> allowed_origins = {};
  int64_t draft_tokens = 0;
  int64_t prefill_tokens = 0;  // 0: as the engine has it
  bool deterministic = false;
  bool fp8_latents = false;
  int64_t host_cache = 0;  // bytes; 0: the default
  std::string dtype, weights;
  DeviceArgs device;
  std::string image_dir = {};
};
int run_serve(const ServeArgs& args);

struct EvalArgs {
  std::string task;  // ppl, mqar, niah, vision or tools
  std::string model;
  std::string data;                              // ppl: the text; niah: the haystack
  int64_t context = 2048;                        // ppl: window; mqar, niah: longest sequence
  int64_t max_tokens = 0;                        // ppl: 0 = all
  int64_t samples = 0;                           // mqar, niah: sequences a point; 0 = 32 and 10
  int64_t distractors = 0;                       // niah
  std::string environment, options_json = "{}";  // tools
  double temperature = 1;                        // tools
  uint64_t seed = 0;
  std::string dtype, weights;
  bool json = false;
  DeviceArgs device;
};
int run_eval(const EvalArgs& args);

struct LogitsArgs {
  std::string model;
  std::string tokens;          // a JSON file: list of ids
  std::string out;             // .safetensors
  std::vector<int64_t> split;  // pieces to feed; empty = at once
  std::vector<std::string> images;
  std::string dtype = "f32", weights;
  DeviceArgs device;
};
int run_logits(const LogitsArgs& args);

struct ConvertArgs {
  std::string in;
  std::string out;
  std::string dtype;        // bf16, f32 or mxfp4; empty: as stored
  std::string layout;       // k3 or kimi-linear; empty: that of `in`
  std::string scales_from;  // mxfp4: a model directory whose scales are kept
  uint64_t shard_bytes = 5'000'000'000;
  int threads = 0;
};
int run_convert(const ConvertArgs& args);

struct InspectArgs {
  std::string path;
  bool json = false;
};
int run_inspect(const InspectArgs& args);

struct TrainArgs {
  std::string recipe;
  std::vector<std::string> overrides;  // key=value
  bool resume = false;
  bool no_memory_check = false;
  DeviceArgs device;
};
int run_train(const TrainArgs& args);

struct RlArgs {
  std::string recipe;
  std::vector<std::string> overrides;  // key=value
  bool resume = false;
  DeviceArgs device;
};
int run_rl(const RlArgs& args);

struct BenchKdaArgs {
  int64_t tokens = 4096;
  int64_t heads = 8;
  int64_t sequences = 1;
  int repeats = 10;
  bool json = false;
  DeviceArgs device;
};
int run_bench_kda(const BenchKdaArgs& args);

struct BenchTrainArgs {
  std::string model = "nano";
  std::string override_json = "{}";
  std::string dtype = "f32";  // f32 | bf16
  int64_t tokens = 4096;
  int64_t sequences = 1;
  int repeats = 5;
  bool recompute = false;
  bool optimizer = true;
  bool profile = false;
  bool json = false;
  DeviceArgs device;
};
int run_bench_train(const BenchTrainArgs& args);

struct BenchDecodeArgs {
  std::string model = "nano";  // a directory, or a preset or config.json: random weights
  std::vector<int64_t> batch = {1, 16};
  std::vector<int64_t> cached = {64};  // tokens that each sequence has seen
  int64_t prefill = 2048;              // a prompt timed alone; 0: none
  int64_t piece = 0;                   // tokens of a prompt in one call; 0: as the engine would
  int64_t steps = 32;
  int repeats = 3;
  bool profile = false;
  bool fp8_latents = false;
  bool synthetic = false;  // the cached tokens are random state instead of a prompt that was read
  std::string dtype, weights;
  bool json = false;
  DeviceArgs device;
};
int run_bench_decode(const BenchDecodeArgs& args);

struct BenchEngineArgs {
  std::string model = "nano";  // as of bench decode
  int64_t requests = 64;
  int64_t prompt = 512;  // tokens of a prompt on average
  int64_t tokens = 64;   // drawn for each
  int64_t max_sequences = 16;
  int64_t cache_tokens = 0;  // 0: as the engine has it
  int64_t draft_tokens = 0;
  bool graphs = true;
  bool deterministic = false;
  bool fp8_latents = false;
  bool check = false;  // answers beside those alone and beside the plain forward
  std::string text;    // a file that prompts are taken from; empty: random tokens
  std::string dtype, weights;
  bool json = false;
  DeviceArgs device;
};
int run_bench_engine(const BenchEngineArgs& args);

struct ReportArgs {
  std::vector<std::string> runs;
  std::string out;  // empty: report.html in the first run directory
};
int run_report(const ReportArgs& args);

}  // namespace godwit::cli
