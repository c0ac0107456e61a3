// A context-free grammar over the bytes of a text and the special tokens of its chat format, as a network:
// nodes with edges that read a symbol, empty edges, and calls of rules. A rule is a node to begin at; it ends
// at nodes that accept. What may come next anywhere is then a set of (node, calls to return to), which
// TokenFilter (token_filter.h) follows.
//
//   Grammar g;
//   const int32_t rule = g.add_rule("greeting");
//   g.accept(g.literal(g.start(rule), "hello"));
//   g.finish(rule);
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace godwit {

// 0..255: a byte; 256 + k: the k-th special token of the tokenizer.
inline constexpr int32_t kGrammarSymbols = 512;
inline constexpr int32_t kSpecialSymbols = 256;

class Grammar {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max() / 4;
  static constexpr size_t kMostNodes = 200000;

  struct Edge {
    uint16_t low, high;  // symbols, inclusive
    int32_t to;
    int32_t cost;
  };
  struct Call {
    int32_t rule;
    int32_t then;  // the node to go on from
  };
  struct Node {
    std::vector<Edge> edges;
    std::vector<int32_t> empty;
    std::vector<Call> calls;
    bool accepts = false;
    int64_t least = kNever;  // cost of the cheapest way to the end of its rule; kNever: there is none
  };

  // Building. Throws Error when the grammar grows beyond kMostNodes.
  int32_t add_node();
  int32_t add_rule(std::string name);  // for errors
  int32_t start(int32_t rule) const { return rules_[rule].start; }
  void edge(int32_t from, int32_t low, int32_t high, int32_t to);
  // What the edges that are added from here on cost: 1, or 0 for what the text can do without when it is cut.
  void set_cost(int32_t cost) { cost_ = cost; }
  void skip(int32_t from, int32_t to) { nodes_[from].empty.push_back(to); }
  void accept(int32_t node) { nodes_[node].accepts = true; }
  // Each gives the node behind what it adds.
  int32_t literal(int32_t from, std::string_view bytes);
  int32_t special(int32_t from, int32_t k);
  int32_t call(int32_t from, int32_t rule);

  // Ends the building: `root` is the whole text. Throws Error, naming the rule, when no text at all fits, or
  // when a rule begins with itself.
  void finish(int32_t root);

  const Node& node(int32_t n) const { return nodes_[n]; }
  size_t size() const { return nodes_.size(); }
  int32_t root() const { return root_; }
  int64_t least() const { return nodes_[start(root_)].least; }  // cost of the cheapest text
  // Symbols that no edge tells apart are of one class.
  int32_t classes() const { return classes_; }
  int32_t class_of(int32_t symbol) const { return class_of_[symbol]; }

 private:
  struct Rule {
    int32_t start;
    std::string name;
  };

  void compute_least();
  void refuse_left_recursion() const;
  void compute_classes();

  std::vector<Node> nodes_;
  std::vector<Rule> rules_;
  int32_t root_ = -1, cost_ = 1;
  int32_t classes_ = 0;
  uint16_t class_of_[kGrammarSymbols] = {};
};

}  // namespace godwit
