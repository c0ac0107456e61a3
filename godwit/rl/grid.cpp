#include <algorithm>
#include <array>
#include <deque>
#include <map>

#include "godwit/base/check.h"
#include "godwit/rl/environments.h"
#include "godwit/rl/tool_environment.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

struct Options {
  int64_t width = 5, height = 5, turns = 24;
  double wander = 0;
};

struct Move {
  const char* name;
  int64_t dx, dy;
};
constexpr std::array<Move, 4> kMoves = {{{"up", 0, -1}, {"down", 0, 1}, {"left", -1, 0}, {"right", 1, 0}}};

// World: rows of the map ('#' wall, 'k' key, 'D' door, 'G' goal, '.'), x, y, key (held). A wall with one door
// parts the map: the goal lies behind it, the key before it.
class Grid final : public ToolEnvironment {
 public:
  explicit Grid(const Options& options) : ToolEnvironment({.turns = options.turns}), options_(options) {}

  std::unique_ptr<ChatMessage> demonstrate() override {
    Draws stray(world.at("stray").get<uint64_t>(), world.at("moves").get<uint64_t>());
    const size_t best = first_move();
    const size_t move = stray.chance(options_.wander) ? static_cast<size_t>(stray.below(4)) : best;
    return std::make_unique<ChatMessage>(assistant_calls("move", {{"direction", kMoves[move].name}}));
  }

  // Where one stands and what one holds; the number of moves so far does not matter.
  uint64_t state_hash() const override {
    json seen = world;
    seen.erase("moves");
    return hash_text(seen.dump());
  }

 private:
  Task begin(Draws& draws) override {
    const int64_t W = options_.width, H = options_.height;
    const int64_t wall = draws.between(2, W - 2), door = draws.below(H);
    std::vector<std::string> rows(H, std::string(W, '.'));
    for (int64_t y = 0; y < H; ++y) rows[y][wall] = y == door ? 'D' : '#';
    const auto free_place = [&](int64_t from, int64_t to) {
      for (;;) {
        const int64_t x = draws.between(from, to), y = draws.below(H);
        if (rows[y][x] == '.') return std::pair(x, y);
      }
    };
    const auto [gx, gy] = free_place(wall + 1, W - 1);
    rows[gy][gx] = 'G';
    const auto [kx, ky] = free_place(0, wall - 1);
    rows[ky][kx] = 'k';
    const auto [x, y] = free_place(0, wall - 1);
    world = {{"rows", rows}, {"x", x}, {"y", y}, {"key", false}, {"moves", 0}, {"stray", draws.bits()}};
    const json tools =
        json::array({tool_declaration("move", "one step: up, down, left, right", {{"direction", "string"}})});
    return {.messages = {user_says("A is you, k a key, D a locked door. Go to G.\n" + view())},
            .tools = tools.dump(),
            .base_tokens = 0};
  }

  std::string view() const {
    std::string text;
    for (size_t y = 0; y < world.at("rows").size(); ++y) {
      auto row = world.at("rows")[y].get<std::string>();
      if (static_cast<int64_t>(y) == world.at("y")) row[world.at("x").get<size_t>()] = 'A';
      text += row + "\n";
    }
    return text + (world.at("key").get<bool>() ? "key: yes" : "key: no");
  }

  // What is at (x, y), a wall outside.
  char at(int64_t x, int64_t y) const {
    if (x < 0 || y < 0 || x >= options_.width || y >= options_.height) return '#';
    return world.at("rows")[static_cast<size_t>(y)].get_ref<const std::string&>()[static_cast<size_t>(x)];
  }

  // Breadth-first over (x, y, key); the first move of a shortest way to the goal.
  size_t first_move() const {
    using Node = std::array<int64_t, 3>;
    const Node start = {world.at("x"), world.at("y"), world.at("key").get<bool>()};
    std::map<Node, size_t> first = {{start, 0}};
    std::deque<Node> queue = {start};
    while (!queue.empty()) {
      const Node n = queue.front();
      queue.pop_front();
      for (size_t m = 0; m < kMoves.size(); ++m) {
        const int64_t x = n[0] + kMoves[m].dx, y = n[1] + kMoves[m].dy;
        const char c = at(x, y);
        if (c == '#' || (c == 'D' && n[2] == 0)) continue;
        const Node next = {x, y, n[2] != 0 || c == 'k'};
        if (first.contains(next)) continue;
        first[next] = n == start ? m : first[n];
        if (c == 'G') return first[next];
        queue.push_back(next);
      }
    }
    return 0;
  }

  ToolAnswer call(const std::string& tool, const json& arguments, Draws&) override {
    if (tool != "move") return {.text = "error: there is no tool " + tool, .wrong = true};
    const auto direction = arguments.at("direction").get<std::string>();
    const auto* move =
        std::find_if(kMoves.begin(), kMoves.end(), [&](const Move& m) { return direction == m.name; });
    if (move == kMoves.end()) return {.text = "error: up, down, left or right", .wrong = true};
    const bool best = static_cast<size_t>(move - kMoves.begin()) == first_move();
    const int64_t x = world.at("x").get<int64_t>() + move->dx, y = world.at("y").get<int64_t>() + move->dy;
    const char c = at(x, y);
    if (c == '#' || (c == 'D' && !world.at("key").get<bool>()))
      return {.text = std::string(c == 'D' ? "the door is locked" : "a wall") + "\n" + view(),
              .checked = true};
    world["x"] = x;
    world["y"] = y;
    world["moves"] = world.at("moves").get<int64_t>() + 1;
    if (c == 'k' || c == 'D') {
      if (c == 'k') world["key"] = true;
      auto row = world["rows"][static_cast<size_t>(y)].get<std::string>();
      row[static_cast<size_t>(x)] = '.';
      world["rows"][static_cast<size_t>(y)] = row;
    }
    return {
        .text = view(), .checked = true, .valid = best, .done = c == 'G', .success = c == 'G' ? 1.0 : 0.0};
  }

  Reply respond(const std::string&) override { return {.success = 0}; }

  Options options_;
};

}  // namespace

std::unique_ptr<Environment> make_grid(const json& options) {
  check_options("grid", options, {"width", "height", "turns", "wander"});
  Options o;
  o.width = options.value("width", o.width);
  o.height = options.value("height", o.height);
  o.turns = options.value("turns", o.turns);
  o.wander = options.value("wander", o.wander);
  check(o.width >= 4 && o.height >= 2 && o.width <= 64 && o.height <= 64,
        "environment grid: {} x {} is not within 4 x 2 to 64 x 64", o.width, o.height);
  return std::make_unique<Grid>(o);
}

}  // namespace godwit::rl
