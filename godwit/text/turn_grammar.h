// The grammar of a whole assistant's turn in K3's XTML format, for answers that must be of a form: JSON in
// the response channel, calls of tools with arguments of their schema. Thoughts are free.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "godwit/text/grammar.h"
#include "godwit/text/tokenizer.h"

namespace godwit {

enum class ResponseForm { kText, kJsonObject, kJsonSchema };
enum class ToolUse { kNone, kAllowed, kRequired };

struct TurnFormat {
  using Json = nlohmann::ordered_json;
  struct Tool {
    std::string name;
    Json parameters;  // a schema; null: no arguments are declared, any are taken
    // Arguments are held to the schema. Otherwise they are any arguments at all.
    bool strict = false;
  };

  bool thinking = true;  // the prompt ends with the opening of the think channel, else of the response's
  ResponseForm response = ResponseForm::kText;
  Json schema = nullptr;
  ToolUse tool_use = ToolUse::kNone;
  std::vector<Tool> tools;     // that may be called
  bool parallel_calls = true;  // more than one
};

// What may follow the prompt, up to and with <|end_of_msg|>. With tools required the response channel is
// empty; with a JSON response and tools allowed there is either. Throws Error that names the keyword and
// place of what a schema has and the grammar has not.
std::shared_ptr<const Grammar> turn_grammar(const TurnFormat& format, const Tokenizer& tokenizer);

// JSON alone, for tests and tools.
std::shared_ptr<const Grammar> json_grammar(const nlohmann::ordered_json& schema);

}  // namespace godwit
