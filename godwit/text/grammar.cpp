#include "godwit/text/grammar.h"

#include <algorithm>
#include <utility>

#include "godwit/base/check.h"

namespace godwit {

int32_t Grammar::add_node() {
  check(nodes_.size() < kMostNodes, "the grammar has more than {} nodes", kMostNodes);
  nodes_.emplace_back();
  return static_cast<int32_t>(nodes_.size()) - 1;
}

int32_t Grammar::add_rule(std::string name) {
  rules_.push_back({add_node(), std::move(name)});
  return static_cast<int32_t>(rules_.size()) - 1;
}

void Grammar::edge(int32_t from, int32_t low, int32_t high, int32_t to) {
  nodes_[from].edges.push_back({static_cast<uint16_t>(low), static_cast<uint16_t>(high), to, cost_});
}

int32_t Grammar::literal(int32_t from, std::string_view bytes) {
  for (const char c : bytes) {
    const int32_t to = add_node();
    edge(from, static_cast<unsigned char>(c), static_cast<unsigned char>(c), to);
    from = to;
  }
  return from;
}

int32_t Grammar::special(int32_t from, int32_t k) {
  const int32_t to = add_node();
  edge(from, kSpecialSymbols + k, kSpecialSymbols + k, to);
  return to;
}

int32_t Grammar::call(int32_t from, int32_t rule) {
  const int32_t to = add_node();
  nodes_[from].calls.push_back({rule, to});
  return to;
}

void Grammar::finish(int32_t root) {
  root_ = root;
  compute_least();
  if (least() >= kNever) {
    // The outermost of the parts that nothing fits was made first.
    for (const Rule& rule : rules_) {
      if (rule.start != start(root) && nodes_[rule.start].least >= kNever)
        fail("{}: no text fits", rule.name);
    }
    fail("{}: no text fits", rules_[root].name);
  }
  refuse_left_recursion();
  compute_classes();
}

// Shortest ways, from far to near until nothing changes: most edges lead from a node to one made after it.
void Grammar::compute_least() {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = nodes_.size(); i-- > 0;) {
      Node& node = nodes_[i];
      int64_t least = node.accepts ? 0 : kNever;
      for (const Edge& e : node.edges) least = std::min(least, e.cost + nodes_[e.to].least);
      for (const int32_t to : node.empty) least = std::min(least, nodes_[to].least);
      for (const Call& c : node.calls)
        least = std::min(least, nodes_[start(c.rule)].least + nodes_[c.then].least);
      if (least < node.least) {
        node.least = least;
        changed = true;
      }
    }
  }
}

// A rule that calls itself before it reads anything would be called for ever. Depth first through the nodes
// that are reached without reading; a call of what may be empty goes on behind it too.
void Grammar::refuse_left_recursion() const {
  enum class Mark : uint8_t { kNew, kOpen, kDone };
  std::vector<Mark> marks(rules_.size(), Mark::kNew);
  // What a rule calls first, each once.
  const auto first_calls = [&](int32_t rule) {
    std::vector<int32_t> nodes = {start(rule)}, out;
    std::vector<int32_t> seen = nodes;
    const auto reach = [&](int32_t node) {
      if (nodes_[node].least >= kNever || std::find(seen.begin(), seen.end(), node) != seen.end()) return;
      seen.push_back(node);
      nodes.push_back(node);
    };
    while (!nodes.empty()) {
      const Node& node = nodes_[nodes.back()];
      nodes.pop_back();
      for (const int32_t to : node.empty) reach(to);
      for (const Call& c : node.calls) {
        const int64_t least = nodes_[start(c.rule)].least;
        if (least >= kNever || nodes_[c.then].least >= kNever) continue;
        if (std::find(out.begin(), out.end(), c.rule) == out.end()) out.push_back(c.rule);
        if (least == 0) reach(c.then);
      }
    }
    return out;
  };
  struct Open {
    int32_t rule;
    std::vector<int32_t> calls;
  };
  for (size_t rule = 0; rule < rules_.size(); ++rule) {
    if (marks[rule] != Mark::kNew) continue;
    std::vector<Open> path;
    const auto enter = [&](int32_t r) {
      marks[r] = Mark::kOpen;
      path.push_back({r, first_calls(r)});
    };
    enter(static_cast<int32_t>(rule));
    while (!path.empty()) {
      if (path.back().calls.empty()) {
        marks[path.back().rule] = Mark::kDone;
        path.pop_back();
        continue;
      }
      const int32_t next = path.back().calls.back();
      path.back().calls.pop_back();
      check(marks[next] != Mark::kOpen, "{}: refers to itself with nothing in between", rules_[next].name);
      if (marks[next] == Mark::kNew) enter(next);
    }
  }
}

void Grammar::compute_classes() {
  std::vector<bool> begins(kGrammarSymbols + 1, false);
  for (const Node& node : nodes_) {
    for (const Edge& e : node.edges) {
      begins[e.low] = true;
      begins[e.high + 1] = true;
    }
  }
  classes_ = 1;
  for (int32_t symbol = 0; symbol < kGrammarSymbols; ++symbol) {
    if (symbol > 0 && begins[symbol]) ++classes_;
    class_of_[symbol] = static_cast<uint16_t>(classes_ - 1);
  }
}

}  // namespace godwit
