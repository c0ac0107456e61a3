// `godwit`: argument parsing and exit codes. 0 done, 1 failed with one clear line on stderr, 2 wrong usage.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <string>

#include "godwit/base/check.h"
#include "godwit/cli/commands.h"

namespace {

using namespace godwit::cli;

// Adds a subcommand whose arguments live as long as the program, and remembers what to run.
class Commands {
 public:
  explicit Commands(CLI::App& app) : app_(app) {}

  template <class Args>
  CLI::App* add(CLI::App* parent, const std::string& name, const std::string& help, int (*run)(const Args&),
                Args*& args) {
    CLI::App* command = (parent ? parent : &app_)->add_subcommand(name, help);
    args = new Args();  // for the whole run
    command->callback([this, run, args] { selected_ = [run, args] { return run(*args); }; });
    return command;
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
  command->add_option("--threads", args.threads, "threads (default: one a core)")->check(CLI::PositiveNumber);
}

void add_model_commands(Commands& commands) {
  PlanArgs* plan = nullptr;
  CLI::App* c =
      commands.add(nullptr, "plan", "what a model costs, from its configuration alone", run_plan, plan);
  c->add_option("model", plan->model, "a model directory, a config.json, or a preset's name")->required();
  c->add_option("--context", plan->context, "tokens of context")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  c->add_flag("--json", plan->json, "one JSON object on stdout");

  InspectArgs* inspect = nullptr;
  c = commands.add(nullptr, "inspect", "what a file or directory holds", run_inspect, inspect);
  c->add_option("path", inspect->path, "a model directory, a safetensors file, or packed data")->required();
  c->add_flag("--json", inspect->json, "one JSON object on stdout");

  LogitsArgs* logits = nullptr;
  c = commands.add(nullptr, "logits", "logits of a token sequence, written to a file", run_logits, logits);
  c->add_option("--model", logits->model, "model directory")->required();
  c->add_option("--tokens", logits->tokens, "JSON file: a list of token ids")->required();
  c->add_option("--out", logits->out, "safetensors file that gets `logits` [T, V] fp32")->required();
  c->add_option("--split", logits->split, "feed the sequence in pieces of these sizes")->delimiter(',');
  c->add_option("--dtype", logits->dtype, "f32 or bf16")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  add_device(c, logits->device);
}

void add_data_commands(CLI::App& app, Commands& commands) {
  CLI::App* tokenizer =
      app.add_subcommand("tokenizer", "train a vocabulary, encode, decode")->require_subcommand(1);
  TokenizerTrainArgs* train = nullptr;
  CLI::App* c = commands.add(tokenizer, "train", "byte-level BPE in tiktoken's file format",
                             run_tokenizer_train, train);
  c->add_option("inputs", train->inputs, "text files (.txt, .txt.zst)")->required();
  c->add_option("--out", train->out, "directory to write")->required();
  c->add_option("--vocab-size", train->vocab_size, "ranks, without the 256 special tokens")
      ->check(CLI::Range(256, 10000000))
      ->capture_default_str();
  for (const bool encode : {true, false}) {
    TokenizerUseArgs* use = nullptr;
    c = commands.add(tokenizer, encode ? "encode" : "decode",
                     encode ? "text to a JSON list of ids" : "a JSON list of ids to text",
                     encode ? run_tokenizer_encode : run_tokenizer_decode, use);
    c->add_option("--tokenizer", use->tokenizer, "a model directory or a tiktoken file")->required();
    if (encode) {
      c->add_option("text", use->text, "the text; without it, stdin");
      c->add_flag("--specials", use->specials, "names of special tokens in the text stand for the tokens");
    } else {
      c->add_option("ids", use->ids, "a JSON list of ids; without it, stdin");
    }
  }
  CLI::App* data = app.add_subcommand("data", "prepare training data")->require_subcommand(1);
  DataPackArgs* pack = nullptr;
  c = commands.add(data, "pack", "text and JSONL to token shards", run_data_pack, pack);
  c->add_option("inputs", pack->inputs, "files (.txt, .jsonl, and these with .zst)")->required();
  c->add_option("--out", pack->out, "directory to write")->required();
  c->add_option("--tokenizer", pack->tokenizer, "a model directory or a tiktoken file")->required();
  c->add_option("--holdout", pack->holdout, "fraction of the text kept out for evaluation")
      ->check(CLI::Range(0.0, 0.9))
      ->capture_default_str();
}

void add_run_commands(Commands& commands) {
  TrainArgs* train = nullptr;
  CLI::App* c = commands.add(nullptr, "train", "train through all stages of a recipe", run_train, train);
  c->add_option("recipe", train->recipe, "recipe (.toml)")->required();
  c->add_option("--set", train->overrides, "key=value over the recipe's own");
  c->add_flag("--resume", train->resume, "go on from the newest checkpoint of the run directory");
  add_device(c, train->device);

  EvalArgs* eval = nullptr;
  c = commands.add(nullptr, "eval",
                   "ppl: held-out text; mqar: associative recall; niah: needle in a haystack", run_eval,
                   eval);
  c->add_option("task", eval->task, "ppl, mqar or niah")
      ->required()
      ->check(CLI::IsMember({"ppl", "mqar", "niah"}));
  c->add_option("--model", eval->model, "model directory")->required();
  c->add_option("--data", eval->data, "ppl: packed data directory or text file");
  c->add_option("--context", eval->context, "ppl: window; niah: longest haystack")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  c->add_option("--max-tokens", eval->max_tokens, "ppl: at most this many tokens (0: all)")
      ->check(CLI::NonNegativeNumber);
  c->add_option("--samples", eval->samples, "mqar, niah: sequences per point")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  c->add_option("--seed", eval->seed, "seed of the generated tasks")->capture_default_str();
  c->add_flag("--json", eval->json, "one JSON object on stdout");
  add_device(c, eval->device);

  for (const bool chat : {false, true}) {
    GenerateArgs* generate = nullptr;
    c = commands.add(nullptr, chat ? "chat" : "generate",
                     chat ? "talk to a model in the terminal" : "continue a prompt",
                     chat ? run_chat : run_generate, generate);
    c->add_option("--model", generate->model, "model directory")->required();
    if (!chat) c->add_option("--prompt", generate->prompt, "text to continue")->required();
    if (!chat) c->add_flag("--json", generate->json, "one JSON object on stdout");
    c->add_option("--max-tokens", generate->max_tokens, "tokens to make at most")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    c->add_option("--temperature", generate->temperature, "0: the most likely token each time")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    c->add_option("--top-p", generate->top_p, "nucleus")->check(CLI::Range(0.0, 1.0))->capture_default_str();
    c->add_option("--top-k", generate->top_k, "0: all")->check(CLI::NonNegativeNumber)->capture_default_str();
    c->add_option("--seed", generate->seed, "seed of the sampler")->capture_default_str();
    add_device(c, generate->device);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Godwit trains, aligns and serves large sparse multimodal models.", "godwit"};
  app.set_version_flag("--version", std::string("godwit ") + GODWIT_VERSION);
  app.require_subcommand(1);
  Commands commands(app);
  add_model_commands(commands);
  add_data_commands(app, commands);
  add_run_commands(commands);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  try {
    return commands.run();
  } catch (const std::exception& e) {
    std::string message = e.what();
    if (const size_t end = message.find("\nException raised from"); end != std::string::npos)
      message.resize(end);  // c10's backtrace
    std::fprintf(stderr, "godwit: %s\n", message.c_str());
    return 1;
  }
}
