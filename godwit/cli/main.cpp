// `godwit`: argument parsing and exit codes. 0 done, 1 failed with one clear line on stderr, 2 wrong usage.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "godwit/base/check.h"
#include "godwit/cli/bench_vision.h"
#include "godwit/cli/commands.h"

namespace {

using namespace godwit::cli;

// CLI11's own validators print the largest double in full, and let nan through.
CLI::Validator number_check(const char* type, const char* expected, bool (*holds)(double)) {
  return {[expected, holds](std::string& text) {
            double value = 0;
            const bool good = CLI::detail::lexical_cast(text, value) && std::isfinite(value) && holds(value);
            return good ? std::string() : fmt::format("expected {}, got {}", expected, text);
          },
          type};
}

const CLI::Validator kPositive = number_check("POSITIVE", "a number above 0", [](double v) { return v > 0; });
const CLI::Validator kNotNegative =
    number_check("NONNEGATIVE", "a number not below 0", [](double v) { return v >= 0; });
// In decimal: CLI11 takes 010 for eight, and what is too large for the largest there is.
CLI::Validator whole_between(uint64_t low, uint64_t high) {
  return {[low, high](std::string& text) {
            uint64_t value = 0;
            const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
            const bool good = error == std::errc() && end == text.data() + text.size() && value >= low &&
                              value <= high && (text == "0" || text[0] != '0');
            return good ? std::string()
                        : fmt::format("expected a whole number from {} to {}, got {}", low, high, text);
          },
          "N"};
}
constexpr uint64_t kMost = 1'000'000'000'000;  // of tokens and the like: sums and bytes of it fit 64 bits
const CLI::Validator kCount = whole_between(1, kMost);
const CLI::Validator kCountOrNone = whole_between(0, kMost);
const CLI::Validator kSeed = whole_between(0, UINT64_MAX);
const CLI::Validator kShare =
    number_check("0 to 1", "a number from 0 to 1", [](double v) { return v >= 0 && v <= 1; });
// More threads than that exhaust the process ids of the machine.
constexpr int kMaxThreads = 4096;

// The subcommands. Each has a struct of arguments that the parser fills and a function that runs on it.
class Commands {
 public:
  explicit Commands(CLI::App& app) : app_(app) {}

  CLI::App* group(const std::string& name, const std::string& help) {
    return app_.add_subcommand(name, help)->require_subcommand(1);
  }

  // Adds a command to `parent` (none: the program) and returns it with its arguments.
  template <class Args>
  std::pair<CLI::App*, Args*> add(CLI::App* parent, const std::string& name, const std::string& help,
                                  int (*run)(const Args&)) {
    CLI::App* command = (parent ? parent : &app_)->add_subcommand(name, help);
    auto args = std::make_shared<Args>();
    command->callback([this, run, args] { selected_ = [run, args] { return run(*args); }; });
    return {command, args.get()};
  }
  int run() const { return selected_(); }

 private:
  CLI::App& app_;
  std::function<int()> selected_;
};

void add_device(CLI::App* command, DeviceArgs& args) {
  command->add_option("--device", args.device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--threads", args.threads, "threads (default: one a core)")
      ->check(CLI::Range(1, kMaxThreads));
}

void add_model(CLI::App* command, std::string& model) {
  command->add_option("--model", model, "model directory")->required()->type_name("DIR");
}

void add_json(CLI::App* command, bool& json) {
  command->add_flag("--json", json, "one JSON object on stdout");
}

void add_images(CLI::App* command, std::vector<std::string>& images, const char* help) {
  command->add_option("--image", images, help)->type_name("FILE")->allow_extra_args(false);
}

CLI::Option* add_dtype(CLI::App* command, std::string& dtype, const char* help) {
  return command->add_option("--dtype", dtype, help)->check(CLI::IsMember({"f32", "bf16"}));
}

constexpr const char* kDeterministic =
    "what a request draws does not depend on what else runs; refused where that cannot be kept";

void add_weights(CLI::App* command, std::string& weights) {
  command
      ->add_option(
          "--weights", weights,
          "packed weights: int8 (linear layers and experts), mxfp4 (experts), mxfp4+int8 (experts, linear "
          "layers) (default: as --dtype)")
      ->check(CLI::IsMember({"int8", "mxfp4", "mxfp4+int8"}));
}

void add_latents(CLI::App* command, bool& fp8) {
  command->add_flag("--fp8-latents", fp8, "cached latents in 8 bits (e4m3): half the memory, other answers");
}

void add_drafts(CLI::App* command, int64_t& tokens) {
  command
      ->add_option(
          "--draft-tokens", tokens,
          "tokens guessed from the text so far and verified in one step; the text stays the same (0: none)")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
}

// A number of tokens: 8192, 15e12.
std::string whole_number(std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= 1 && value < 9e18) || value != std::floor(value))
    return "expected a whole number such as 8192 or 15e12, got " + text;
  text = std::to_string(static_cast<int64_t>(value));
  return {};
}

void add_cluster(CLI::App* plan, PlanArgs& args) {
  const CLI::Validator whole(whole_number, "N");
  const auto count = [&](const char* name, int64_t& value, const char* help) {
    return plan->add_option(name, value, help)->transform(whole)->type_name("");
  };
  const auto number = [&](const char* name, double& value, const char* help) {
    return plan->add_option(name, value, help)->check(kPositive)->capture_default_str();
  };
  count("--gpus", args.gpus, "train on a cluster of this many GPUs");
  count("--tokens", args.tokens, "tokens of the whole training: time and cost");
  count("--tp", args.tp, "tensor parallel ranks (an axis not given is chosen)");
  count("--pp", args.pp, "pipeline stages");
  count("--cp", args.cp, "context parallel ranks");
  count("--ep", args.ep, "expert parallel ranks, of the GPUs of a pipeline stage");
  count("--dp", args.dp, "data parallel ranks");
  count("--batch-tokens", args.batch_tokens, "tokens a step (default: 4 PP sequences a data rank)");
  plan->add_flag("--no-recompute", args.no_recompute, "keep all activations for the backward");
  plan->add_option("--mfu", args.mfu, "share of the GPUs' peak that the step reaches")
      ->check(number_check("SHARE", "a share from 1e-6 to 1", [](double v) { return v >= 1e-6 && v <= 1; }))
      ->capture_default_str();
  plan->add_option("--price", args.price, "of a GPU-hour")->check(kNotNegative)->capture_default_str();
  number("--gpu-memory", args.gpu_memory_gib, "GiB a GPU (default: H200)");
  number("--gpu-bandwidth", args.gpu_bandwidth_tb, "TB/s of a GPU's memory");
  number("--gpu-tflops", args.gpu_tflops, "peak of a GPU, dense bf16");
  number("--link", args.link_gb, "GB/s to a GPU of the same host, one direction");
  number("--network", args.network_gb, "GB/s to another host, one direction");
  count("--gpus-per-host", args.gpus_per_host, "GPUs of one host")->capture_default_str();
}

void add_model_commands(Commands& commands) {
  const auto [plan, plan_args] =
      commands.add(nullptr, "plan", "what a model costs, from its configuration alone", run_plan);
  plan->add_option("model", plan_args->model, "a model directory, a config.json, or a preset's name")
      ->required();
  const CLI::Validator whole(whole_number, "N");
  plan->add_option("--context", plan_args->context, "tokens of context")
      ->transform(whole)
      ->type_name("")
      ->capture_default_str();
  plan->add_option("--batch", plan_args->batch, "sequences that a decode step serves")
      ->check(kCount)
      ->capture_default_str();
  add_cluster(plan, *plan_args);
  add_json(plan, plan_args->json);

  const auto [inspect, inspect_args] =
      commands.add(nullptr, "inspect", "what a file or directory holds", run_inspect);
  inspect
      ->add_option("path", inspect_args->path,
                   "a model directory, a training checkpoint, packed data, a safetensors file or a picture")
      ->required();
  add_json(inspect, inspect_args->json);

  const auto [logits, logits_args] =
      commands.add(nullptr, "logits", "logits of a token sequence, written to a file", run_logits);
  add_model(logits, logits_args->model);
  logits->add_option("--tokens", logits_args->tokens, "JSON file: a list of token ids")->required();
  logits->add_option("--out", logits_args->out, "safetensors file that gets `logits` [T, V] fp32")
      ->required();
  logits->add_option("--split", logits_args->split, "feed the sequence in pieces of these sizes: N,M,...")
      ->delimiter(',')
      ->check(kCount);
  add_images(logits, logits_args->images, "picture behind the next <|media_pad|>, or run of them");
  add_dtype(logits, logits_args->dtype, "weights and activations: f32 or bf16")->capture_default_str();
  add_weights(logits, logits_args->weights);
  add_device(logits, logits_args->device);
}

void add_convert_command(Commands& commands) {
  const auto [convert, args] =
      commands.add(nullptr, "convert", "a checkpoint in another type or layout", run_convert);
  convert->add_option("in", args->in, "a model directory, or checkpoints/step-N of a training run")
      ->required();
  convert->add_option("out", args->out, "directory to write")->required();
  convert
      ->add_option("--dtype", args->dtype,
                   "bf16, f32, or mxfp4 for the routed experts (the rest bf16) (default: as stored)")
      ->check(CLI::IsMember({"bf16", "f32", "mxfp4"}));
  convert->add_option("--layout", args->layout, "k3 or kimi-linear (default: that of the input)")
      ->check(CLI::IsMember({"k3", "kimi-linear"}));
  convert
      ->add_option("--scales-from", args->scales_from,
                   "mxfp4: take the scales of this model directory, so that its bytes come back")
      ->type_name("DIR");
  convert
      ->add_option(
          "--shard-size", args->shard_bytes,
          "largest file, as 800MB or 5GB; a Kimi K3 model beyond it gets a file a layer, as released")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(kPositive)
      ->default_str("5GB");
  convert->add_option("--threads", args->threads, "threads (default: one a core)")
      ->check(CLI::Range(1, kMaxThreads));
}

void add_tokenizer_commands(Commands& commands) {
  CLI::App* tokenizer = commands.group("tokenizer", "train a vocabulary, encode, decode");
  const auto [train, train_args] =
      commands.add(tokenizer, "train", "byte-level BPE in tiktoken's file format", run_tokenizer_train);
  train->add_option("inputs", train_args->inputs, "text files, plain or .zst")->required();
  train->add_option("--out", train_args->out, "directory to write")->required();
  train->add_option("--vocab-size", train_args->vocab_size, "ranks, without the 256 special tokens")
      ->check(CLI::Range(256, 10000000))
      ->capture_default_str();

  constexpr const char* kTokenizer = "a model directory or a tiktoken file";
  const auto [encode, encode_args] =
      commands.add(tokenizer, "encode", "text to a JSON list of ids", run_tokenizer_encode);
  encode->add_option("--tokenizer", encode_args->tokenizer, kTokenizer)->required();
  encode->add_option("text", encode_args->input, "the text; without it, stdin");
  encode->add_flag("--specials", encode_args->specials,
                   "names of special tokens in the text stand for the tokens");

  const auto [decode, decode_args] =
      commands.add(tokenizer, "decode", "a JSON list of ids to text", run_tokenizer_decode);
  decode->add_option("--tokenizer", decode_args->tokenizer, kTokenizer)->required();
  decode->add_option("ids", decode_args->input, "a JSON list of ids; without it, stdin");
}

void add_data_commands(Commands& commands) {
  CLI::App* data = commands.group("data", "prepare training data");
  const auto [pack, args] = commands.add(data, "pack", "text and JSONL to token shards", run_data_pack);
  pack->add_option("inputs", args->inputs, "files or directories: text, .jsonl, and these with .zst")
      ->required();
  pack->add_option("--out", args->out, "directory to write")->required()->type_name("DIR");
  pack->add_option("--tokenizer", args->tokenizer,
                   "a model directory or a tiktoken file (default: every byte is a token)");
  pack->add_option("--holdout", args->holdout, "share of the text kept out for evaluation")
      ->check(number_check("0 to 0.9", "a number from 0 to 0.9", [](double v) { return v >= 0 && v <= 0.9; }))
      ->capture_default_str();
  pack->add_flag("--replace", args->replace, "put the result in the place of an existing directory");
  const auto [demos, demo_args] = commands.add(
      data, "demos", "conversations of an environment's scripted expert, to fine-tune on", run_data_demos);
  demos->add_option("environment", demo_args->environment, "its name, as in an RL recipe")->required();
  demos->add_option("--out", demo_args->out, "file to write, one conversation a line")
      ->required()
      ->type_name("FILE.jsonl");
  demos->add_option("--options", demo_args->options_json, "of the environment, a JSON object")
      ->capture_default_str();
  demos->add_option("--count", demo_args->count, "episodes")->check(kCount)->capture_default_str();
  demos->add_option("--seed", demo_args->seed, "of the first episode; the next have the numbers after it")
      ->check(kSeed)
      ->capture_default_str();
}

// The model's directory, how to draw, and where it runs.
void add_sampling(CLI::App* command, ModelArgs& args) {
  add_model(command, args.model);
  command->add_option("--max-tokens", args.max_tokens, "tokens to make at most")
      ->check(kCount)
      ->capture_default_str();
  command->add_option("--temperature", args.temperature, "0: the most likely token each time")
      ->check(kNotNegative)
      ->capture_default_str();
  command->add_option("--top-p", args.top_p, "draw among the likeliest tokens of this total probability")
      ->check(kShare)
      ->capture_default_str();
  command->add_option("--top-k", args.top_k, "draw among this many tokens (0: all)")
      ->check(kCountOrNone)
      ->capture_default_str();
  command->add_option("--seed", args.seed, "seed of the sampler")->check(kSeed)->capture_default_str();
  add_drafts(command, args.draft_tokens);
  add_dtype(command, args.dtype, "weights and activations: f32 or bf16 (default: the checkpoint's)");
  add_weights(command, args.weights);
  add_device(command, args.device);
}

void add_run_commands(Commands& commands) {
  const auto [train, train_args] =
      commands.add(nullptr, "train", "train through all stages of a recipe", run_train);
  train->add_option("recipe", train_args->recipe, "recipe (.toml)")->required();
  train->add_option("--set", train_args->overrides, "key=value, laid over the recipe's own");
  train->add_flag("--resume", train_args->resume, "go on from the newest checkpoint of the run directory");
  train->add_flag("--no-memory-check", train_args->no_memory_check,
                  "start although the forecast exceeds the free memory");
  add_device(train, train_args->device);

  const auto [rl, rl_args] =
      commands.add(nullptr, "rl", "reinforcement learning in an environment, by a recipe", run_rl);
  rl->add_option("recipe", rl_args->recipe, "recipe (.toml)")->required();
  rl->add_option("--set", rl_args->overrides, "key=value, laid over the recipe's own");
  rl->add_flag("--resume", rl_args->resume, "go on from the newest checkpoint of the run directory");
  add_device(rl, rl_args->device);

  const auto [report, report_args] =
      commands.add(nullptr, "report", "one HTML page with the plots of one or several runs", run_report);
  report->add_option("runs", report_args->runs, "run directories")->required()->type_name("RUN_DIR");
  report->add_option("--out", report_args->out, "file to write (default: report.html in the first run)");

  const auto [generate, generate_args] = commands.add(nullptr, "generate", "continue a prompt", run_generate);
  generate->add_option("--prompt", generate_args->prompt, "text to continue")->required();
  add_images(generate, generate_args->images,
             "JPEG, PNG or WebP: before the text, or where it says <|kimi_image_placeholder|>");
  add_sampling(generate, generate_args->model);
  add_json(generate, generate_args->json);

  const auto [chat, chat_args] =
      commands.add(nullptr, "chat", "talk to a model: Ctrl-D ends, Ctrl-C stops an answer", run_chat);
  add_sampling(chat, chat_args->model);
  add_images(chat, chat_args->images, "picture of the first message; later ones: a line `/image FILE`");
  chat->add_option("--system", chat_args->system, "system message");
  chat->add_flag("--no-thinking", chat_args->no_thinking, "answer at once");

  const auto [serve, serve_args] =
      commands.add(nullptr, "serve",
                   "the model over HTTP: OpenAI-style API and a page (GODWIT_API_KEY: its key)", run_serve);
  add_model(serve, serve_args->model);
  serve->add_option("--host", serve_args->host, "address to listen on")->capture_default_str();
  serve->add_option("--port", serve_args->port, "port to listen on (0: any free one)")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  serve->add_option("--name", serve_args->name, "the model's name for clients (default: the directory's)");
  serve->add_option("--max-sequences", serve_args->max_sequences, "sequences that run together")
      ->check(whole_between(1, 65536))
      ->capture_default_str();
  serve->add_option("--max-context", serve_args->max_context, "tokens of one sequence (0: the model's)")
      ->check(kCountOrNone)
      ->capture_default_str();
  serve
      ->add_option("--cache-tokens", serve_args->cache_tokens,
                   "tokens of all sequences and cached prefixes (0: --max-sequences times at most 8192)")
      ->check(kCountOrNone)
      ->capture_default_str();
  serve->add_option("--max-waiting", serve_args->max_waiting, "requests in the queue, then 429")
      ->check(kCount)
      ->capture_default_str();
  serve->add_option("--max-wait", serve_args->max_wait, "seconds in the queue, then 503 (0: any time)")
      ->check(kNotNegative)
      ->capture_default_str();
  serve
      ->add_option("--shutdown-timeout", serve_args->shutdown_timeout,
                   "seconds that running requests have to end after SIGTERM or Ctrl-C")
      ->check(number_check("0 to 86400", "seconds from 0 to 86400",
                           [](double v) { return v >= 0 && v <= 86400; }))
      ->capture_default_str();
  serve
      ->add_option(
          "--allow-origin", serve_args->allowed_origins,
          "pages that may call the API from a browser, as https://example.org; *: all (default: this "
          "server's own)")
      ->type_name("ORIGIN")
      ->check([](const std::string& text) {
        const size_t scheme = text.find("://");
        const bool good = text == "*" || (scheme != text.npos && scheme > 0 && scheme + 3 < text.size() &&
                                          text.find('/', scheme + 3) == text.npos);
        return good ? std::string() : "expected https://example.org or *, got " + text;
      })
      ->allow_extra_args(false);
  add_drafts(serve, serve_args->draft_tokens);
  add_latents(serve, serve_args->fp8_latents);
  serve
      ->add_option("--prefill-tokens", serve_args->prefill_tokens,
                   "of prompts, read in one step (default: 512, on a GPU 8192)")
      ->check(kCount);
  serve->add_flag("--deterministic", serve_args->deterministic, kDeterministic);
  serve
      ->add_option("--host-cache", serve_args->host_cache,
                   "host memory for prefixes that left the cache, as 2GB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(whole_between(0, uint64_t{1} << 50))
      ->default_str("268MB");
  serve
      ->add_option("--image-dir", serve_args->image_dir,
                   "pictures that clients may name as file:NAME (default: none)")
      ->check(CLI::ExistingDirectory);
  add_dtype(serve, serve_args->dtype, "weights and activations: f32 or bf16 (default: the checkpoint's)");
  add_weights(serve, serve_args->weights);
  add_device(serve, serve_args->device);

  const auto [eval, eval_args] =
      commands.add(nullptr, "eval",
                   "ppl: loss on text; mqar: recall of random pairs; niah: needle in a haystack; vision: "
                   "questions about pictures; tools: tasks of an environment",
                   run_eval);
  eval->add_option("task", eval_args->task, "ppl, mqar, niah, vision or tools")
      ->required()
      ->check(CLI::IsMember({"ppl", "mqar", "niah", "vision", "tools"}));
  add_model(eval, eval_args->model);
  eval->add_option(
      "--data", eval_args->data,
      "the text (niah: the haystack): packed data, of it the held-out part, a text file or a "
      "directory (default: ppl the data of the model's run, niah a filler); vision: JSONL of questions");
  eval->add_option("--context", eval_args->context,
                   "ppl: tokens of a window; mqar, niah: longest sequence; tools: of an episode")
      ->check(kCount)
      ->capture_default_str();
  eval->add_option("--max-tokens", eval_args->max_tokens, "ppl: at most this many tokens (0: all)")
      ->check(kCountOrNone)
      ->capture_default_str();
  eval->add_option("--samples", eval_args->samples,
                   "sequences a point (default: mqar 32, niah 10); vision: questions a task (default: all); "
                   "tools: tasks "
                   "(default: 128)")
      ->check(kCount);
  eval->add_option("--distractors", eval_args->distractors, "niah: needles of other names besides")
      ->check(CLI::Range(0, 17))
      ->capture_default_str();
  eval->add_option("--environment", eval_args->environment, "tools: what the model acts in");
  eval->add_option("--options", eval_args->options_json, "tools: of the environment, a JSON object")
      ->capture_default_str();
  eval->add_option("--temperature", eval_args->temperature, "tools: of the draws")
      ->check(kNotNegative)
      ->capture_default_str();
  eval->add_option("--seed", eval_args->seed, "seed of the tasks")->check(kSeed)->capture_default_str();
  add_dtype(eval, eval_args->dtype, "weights and activations: f32 or bf16 (default: the checkpoint's)");
  add_weights(eval, eval_args->weights);
  add_device(eval, eval_args->device);
  add_json(eval, eval_args->json);
}

// The first word where a command is expected that names none; empty if there is no such word. CLI11 would say
// that a command is missing.
std::string unknown_command(const CLI::App& program, int argc, char** argv) {
  const CLI::App* app = &program;
  for (int i = 1; i < argc && argv[i][0] != '-'; ++i) {
    const auto commands = app->get_subcommands([](const CLI::App*) { return true; });
    if (commands.empty()) return {};
    const auto named = [&](const CLI::App* command) { return command->get_name() == argv[i]; };
    const auto found = std::find_if(commands.begin(), commands.end(), named);
    if (found == commands.end()) return argv[i];
    app = *found;
  }
  return {};
}

void add_bench_train(Commands& commands, CLI::App* bench) {
  const auto [train, args] = commands.add(
      bench, "train", "a training step on random tokens: forward, backward, optimiser", run_bench_train);
  train->add_option("--model", args->model, "preset, directory or config.json")->capture_default_str();
  train->add_option("--override", args->override_json, "configuration keys laid over it, a JSON object");
  train->add_option("--dtype", args->dtype, "of weights and activations")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  train->add_option("--tokens", args->tokens, "of all sequences")->check(kCount)->capture_default_str();
  train->add_option("--sequences", args->sequences, "of equal length")->check(kCount)->capture_default_str();
  train->add_option("--repeats", args->repeats, "the best of these counts")
      ->check(kCount)
      ->capture_default_str();
  train->add_flag("--recompute", args->recompute, "keep only each layer's inputs");
  train->add_flag("!--no-optimizer", args->optimizer, "leave out the whole step with its optimiser state");
  train->add_flag("--profile", args->profile, "where the time goes, by kernel or op");
  add_json(train, args->json);
  add_device(train, args->device);
}

void add_bench_vision(Commands& commands, CLI::App* bench) {
  const auto [vision, args] = commands.add(
      bench, "vision", "the vision tower on random pictures, beside PyTorch's operations", run_bench_vision);
  vision->add_option("--model", args->model, "preset, directory or config.json")->capture_default_str();
  vision->add_option("--dtype", args->dtype, "of weights and activations")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  vision
      ->add_option("--grids", args->grids,
                   "sizes of pictures in patches, ROWSxCOLUMNS or ROWSxCOLUMNSxFRAMES")
      ->delimiter(',')
      ->capture_default_str();
  vision->add_option("--count", args->count, "pictures of each size, by turns")
      ->check(kCount)
      ->capture_default_str();
  vision->add_option("--repeats", args->repeats, "passes that are timed")
      ->check(kCount)
      ->capture_default_str();
  vision->add_flag("--agreement", args->agreement,
                   "compare vectors and gradients with fp64 on the CPU first");
  add_json(vision, args->json);
  add_device(vision, args->device);
}

void add_bench_decode(Commands& commands, CLI::App* bench) {
  const auto [decode, args] = commands.add(
      bench, "decode", "a model's prefill and decode, beside the bytes it must move", run_bench_decode);
  decode->add_option("--model", args->model, "a model directory, or a preset or config.json: random weights")
      ->capture_default_str();
  decode->add_option("--batch", args->batch, "sequences that decode together: N,M,...")
      ->delimiter(',')
      ->check(kCount);
  decode->add_option("--cached", args->cached, "tokens that each of them has seen: N,M,...")
      ->delimiter(',')
      ->check(kCountOrNone);
  decode->add_option("--prefill", args->prefill, "tokens of a prompt that is timed too (0: none)")
      ->check(kCountOrNone)
      ->capture_default_str();
  decode->add_option("--piece", args->piece, "tokens of a prompt in one call (default: as the engine has it)")
      ->check(kCount);
  decode->add_flag("--profile", args->profile, "where the time goes, by kernel or op");
  decode->add_option("--steps", args->steps, "decode steps in a row")->check(kCount)->capture_default_str();
  decode->add_option("--repeats", args->repeats, "the best of these counts")
      ->check(kCount)
      ->capture_default_str();
  add_latents(decode, args->fp8_latents);
  decode->add_flag("--synthetic", args->synthetic,
                   "cached tokens are random state, not a prompt that was read: the same work, at once");
  add_dtype(decode, args->dtype, "weights and activations: f32 or bf16 (default: the checkpoint's)");
  add_weights(decode, args->weights);
  add_json(decode, args->json);
  add_device(decode, args->device);
}

void add_bench_engine(Commands& commands, CLI::App* bench) {
  const auto [engine, args] =
      commands.add(bench, "engine", "many requests at once through the inference engine", run_bench_engine);
  engine->add_option("--model", args->model, "a model directory, or a preset or config.json: random weights")
      ->capture_default_str();
  engine->add_option("--requests", args->requests, "all submitted at the start")
      ->check(kCount)
      ->capture_default_str();
  engine->add_option("--prompt", args->prompt, "tokens of a prompt on average, half to one and a half of it")
      ->check(kCount)
      ->capture_default_str();
  engine->add_option("--text", args->text, "prompts are pieces of this file (default: random tokens)");
  engine->add_option("--tokens", args->tokens, "drawn for each")->check(kCount)->capture_default_str();
  engine->add_option("--max-sequences", args->max_sequences, "that run together")
      ->check(kCount)
      ->capture_default_str();
  engine->add_option("--cache-tokens", args->cache_tokens, "of all sequences and cached prefixes")
      ->check(kCount);
  engine->add_flag("!--no-graphs", args->graphs, "on a GPU, decode steps op by op");
  engine->add_flag("--deterministic", args->deterministic, kDeterministic);
  engine->add_flag("--check", args->check,
                   "every answer beside that of its request alone and beside the plain forward");
  add_drafts(engine, args->draft_tokens);
  add_latents(engine, args->fp8_latents);
  add_dtype(engine, args->dtype, "weights and activations: f32 or bf16 (default: the checkpoint's)");
  add_weights(engine, args->weights);
  add_json(engine, args->json);
  add_device(engine, args->device);
}

void add_bench_commands(Commands& commands) {
  CLI::App* bench = commands.group("bench", "time the ops on this machine, beside what they replace");
  const auto [kda, args] =
      commands.add(bench, "kda", "Kimi Delta Attention beside the recurrence token by token", run_bench_kda);
  kda->add_option("--tokens", args->tokens, "of all sequences")->check(kCount)->capture_default_str();
  kda->add_option("--heads", args->heads, "of width 128")->check(kCount)->capture_default_str();
  kda->add_option("--sequences", args->sequences, "of equal length")->check(kCount)->capture_default_str();
  kda->add_option("--repeats", args->repeats, "the best of these counts")
      ->check(kCount)
      ->capture_default_str();
  add_json(kda, args->json);
  add_device(kda, args->device);
  add_bench_train(commands, bench);
  add_bench_vision(commands, bench);
  add_bench_decode(commands, bench);
  add_bench_engine(commands, bench);
}

// The message alone, as one line: LibTorch's errors carry a backtrace.
std::string one_line(std::string message) {
  if (const size_t end = message.find("\nException raised from"); end != std::string::npos)
    message.resize(end);
  for (char& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  return message;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_DFL);  // a reader that goes away ends the program without a word
  std::signal(SIGXFSZ, SIG_IGN);  // a file above the size limit is a failed write with a message
  CLI::App app{"Godwit trains, aligns and serves large sparse multimodal models.", "godwit"};
  app.set_version_flag("--version", std::string("godwit ") + GODWIT_VERSION);
  app.require_subcommand(1);
  Commands commands(app);
  add_model_commands(commands);
  add_convert_command(commands);
  add_tokenizer_commands(commands);
  add_data_commands(commands);
  add_run_commands(commands);
  add_bench_commands(commands);
  if (const std::string word = unknown_command(app, argc, argv); !word.empty()) {
    std::fprintf(stderr, "There is no command '%s'\nRun with --help for more information.\n", word.c_str());
    return 2;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  try {
    return commands.run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "godwit: %s\n", one_line(e.what()).c_str());
    return 1;
  }
}
