#include "godwit/report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "godwit/report/chart.h"

namespace godwit::report {
namespace {

constexpr size_t kMostPoints = 1200;  // of a line
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

int colour_of(size_t run) {
  return static_cast<int>(run % 8);
}

std::vector<Point> points_of(const Run& run, const std::string& key, const char* over = "step") {
  const Column &steps = run.column(over), &values = run.column(key);
  std::vector<Point> out;
  for (size_t i = 0; i < values.size(); ++i) out.push_back({steps[i], values[i]});
  return out;
}

std::vector<Point> finite(std::vector<Point> points) {
  std::erase_if(points, [](const Point& p) { return !std::isfinite(p.y); });
  return points;
}

// Where the row of `step` lies on the axis `over`.
double at_step(const Run& run, double step, const char* over) {
  const Column &steps = run.column("step"), &axis = run.column(over);
  for (size_t i = 0; i < steps.size(); ++i)
    if (steps[i] >= step) return axis[i];
  return axis.back();
}

double last_of(const Run& run, const std::string& key) {
  const std::vector<Point> points = finite(points_of(run, key));
  return points.empty() ? kNone : points.back().y;
}

std::string cell(double value, const char* format = "{:.3f}") {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : "–";
}

double largest(const std::vector<double>& values) {
  double most = kNone;
  for (const double v : values)
    if (std::isfinite(v) && !(most >= v)) most = v;
  return most;
}

// A value a row from a list column: its largest entry.
std::vector<Point> largest_of(const Run& run, const std::string& key) {
  const Column& steps = run.column("step");
  const ListColumn& lists = run.list(key);
  std::vector<Point> out;
  for (size_t i = 0; i < lists.size(); ++i)
    if (!lists[i].empty()) out.push_back({steps[i], largest(lists[i])});
  return out;
}

double seconds_of(const Run& run) {
  const Column &tokens = run.column("tokens"), &rate = run.column("tokens_per_s");
  double seconds = 0, before = 0;
  for (size_t i = 0; i < std::min(tokens.size(), rate.size()); ++i) {
    if (!std::isfinite(tokens[i]) || !(rate[i] > 0)) continue;
    seconds += (tokens[i] - before) / rate[i];
    before = tokens[i];
  }
  return seconds;
}

std::string duration(double s) {
  if (!(s > 0)) return "–";
  if (s < 90) return fmt::format("{:.0f} s", s);
  return s < 5400 ? fmt::format("{:.0f} min", s / 60) : fmt::format("{:.1f} h", s / 3600);
}

std::string summary(const std::vector<Run>& runs) {
  std::string out =
      "<div class=\"scroll\"><table><tr><th>run</th><th>steps</th><th>tokens</th><th>training "
      "time</th><th>tokens/s</th>"
      "<th>loss</th><th>held-out loss</th><th>bits a byte</th><th>MaxVio</th><th>dead experts</th></tr>";
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const double tokens = last_of(run, "tokens"), seconds = seconds_of(run);
    const std::vector<Point> vio = largest_of(run, "max_vio"), dead = largest_of(run, "dead_experts");
    out += fmt::format(
        "<tr><td><i class=\"key b{}\"></i> {}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>",
        colour_of(i), escape(run.name), cell(last_of(run, "step"), "{:.0f}"),
        std::isfinite(tokens) ? short_number(tokens) : "–", duration(seconds),
        seconds > 0 ? cell(tokens / seconds, "{:.0f}") : "–", cell(last_of(run, "loss")));
    out +=
        fmt::format("<td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>", cell(last_of(run, "held_out_loss")),
                    cell(last_of(run, "bits_per_byte")), cell(vio.empty() ? kNone : vio.back().y, "{:.2f}"),
                    cell(dead.empty() ? kNone : dead.back().y, "{:.0f}"));
  }
  return out + "</table></div>\n";
}

std::string gate_table(const std::vector<Run>& runs) {
  std::string rows;
  for (const Run& run : runs)
    for (const Gate& gate : run.gates)
      rows += fmt::format(
          "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td "
          "class=\"{}\">{}</td></tr>",
          escape(run.name), escape(gate.stage), cell(gate.context, "{:.0f}"), cell(gate.before, "{:.4f}"),
          cell(gate.after, "{:.4f}"), cell(gate.limit, "+{:g}"), gate.passed() ? "good-text" : "bad-text",
          gate.passed() ? "passed" : "failed");
  if (rows.empty()) return "<p class=\"none\">No gate was passed yet.</p>\n";
  return "<div class=\"scroll\"><table><tr><th>run</th><th>gate of stage</th><th>measured at "
         "context</th><th>held-out loss "
         "before</th><th>after</th><th>allowed</th><th></th></tr>" +
         rows + "</table></div>\n";
}

Chart loss_chart(const std::vector<Run>& runs) {
  // Over tokens, where every run counts them: short stages of long sequences would vanish over steps.
  const bool tokens = std::all_of(runs.begin(), runs.end(), [](const Run& run) {
    return !run.column("tokens").empty() && finite(points_of(run, "tokens")).size() == run.rows();
  });
  const char* over = tokens ? "tokens" : "step";
  Chart chart{.title = "Loss by stage", .x_label = over, .y_label = "nats a token"};
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const std::vector<Point> raw = points_of(run, "loss", over);
    const double horizon = static_cast<double>(raw.size()) / 60;
    const bool noisy = horizon > 2;
    chart.series.push_back({.name = noisy ? "" : run.name,
                            .colour = colour_of(i),
                            .points = thin(raw, kMostPoints),
                            .faint = noisy});
    if (noisy)
      chart.series.push_back(
          {.name = run.name, .colour = colour_of(i), .points = thin(smooth(raw, horizon), kMostPoints)});
    std::vector<Point> held = finite(points_of(run, "held_out_loss", over));
    if (!held.empty())
      chart.series.push_back(
          {.name = run.name + ": held out", .colour = colour_of(i), .points = thin(held, 200), .dots = true});
    for (const Gate& gate : run.gates)
      chart.flags.push_back(
          {.x = at_step(run, gate.step, over),
           .y = gate.after,
           .good = gate.passed(),
           .text = fmt::format(
               "{}, gate of stage {}: held-out loss at context {:.0f} {:.4f} → {:.4f}, allowed +{:g}: {}",
               run.name, gate.stage, gate.context, gate.before, gate.after, gate.limit,
               gate.passed() ? "passed" : "failed")});
  }
  for (const Stage& stage : runs.front().stages)
    chart.marks.push_back({runs.front().column(over)[stage.first],
                           std::isfinite(stage.context)
                               ? fmt::format("{} ({})", stage.name, short_number(stage.context))
                               : stage.name});
  return chart;
}

Chart position_chart(const std::vector<Run>& runs) {
  Chart chart{.title = "Loss by position, held-out text",
              .x_label = "position in the window",
              .y_label = "nats a token",
              .log_x = true};
  for (size_t i = 0; i < runs.size(); ++i) {
    std::vector<Point> points;
    for (const PositionLoss& p : runs[i].positions) {  // a step over each stretch
      points.push_back({std::max(p.begin, 1.0), p.nats});
      points.push_back({std::max(p.end, 1.0), p.nats});
    }
    if (!points.empty())
      chart.series.push_back({.name = runs[i].name, .colour = colour_of(i), .points = points});
  }
  return chart;
}

constexpr double kLoadEdges[] = {0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 3.0, 5.0};  // over the mean load

// 0: no token; 1 ... 8 between the edges.
int load_level(double load) {
  if (!std::isfinite(load)) return -1;
  if (load <= 0) return 0;
  int level = 1;
  while (level < 8 && load >= kLoadEdges[level]) ++level;
  return level;
}

std::string load_maps(const std::vector<Run>& runs) {
  std::string out;
  for (const Run& run : runs) {
    Map map{.title = "Expert load: " + run.name,
            .x_label = "expert",
            .y_label = "MoE layer; load over the mean load, last steps"};
    map.level_names = {"none", "< ¼", "< ½", "< 0.8", "0.8 to 1.25", "< 2", "< 3", "< 5", "≥ 5"};
    for (size_t layer = 0; layer < run.expert_load.size(); ++layer) {
      map.row_names.push_back(fmt::format("{}", layer));
      map.levels.emplace_back();
      for (const double load : run.expert_load[layer]) map.levels.back().push_back(load_level(load));
      map.row_notes.push_back(fmt::format("max {:.1f}", largest(run.expert_load[layer])));
      map.x_end = std::max(map.x_end, static_cast<double>(map.levels.back().size()));
    }
    out +=
        render(map, "This run recorded no expert load: it has no experts, or it has not finished a stage.");
  }
  return out;
}

constexpr double kVioEdges[] = {0.25, 0.5, 1, 2, 4, 8, 16};

int vio_level(double vio) {
  if (!std::isfinite(vio)) return -1;
  int level = 0;
  while (level < 7 && vio >= kVioEdges[level]) ++level;
  return level + 1;
}

// Layers by time: of each stretch of steps the largest.
std::string vio_maps(const std::vector<Run>& runs) {
  std::string out;
  for (const Run& run : runs) {
    const ListColumn& rows = run.list("max_vio");
    Map map{.title = "MaxVio by layer: " + run.name,
            .x_label = "step",
            .y_label = "MoE layer; largest load over the mean, less one"};
    map.level_names = {"", "< ¼", "< ½", "< 1", "< 2", "< 4", "< 8", "< 16", "≥ 16"};
    size_t layers = 0;
    for (const auto& row : rows) layers = std::max(layers, row.size());
    const size_t columns = std::min<size_t>(rows.size(), 160);
    map.levels.assign(layers, std::vector<int>(layers > 0 ? columns : 0, -1));
    for (size_t layer = 0; layer < layers; ++layer) {
      map.row_names.push_back(fmt::format("{}", layer));
      double last = kNone;
      for (size_t c = 0; c < columns; ++c) {
        double most = kNone;
        for (size_t r = rows.size() * c / columns; r < rows.size() * (c + 1) / columns; ++r)
          if (layer < rows[r].size() && std::isfinite(rows[r][layer]))
            most = std::max(last = rows[r][layer], std::isfinite(most) ? most : 0);
        map.levels[layer][c] = vio_level(most);
      }
      map.row_notes.push_back(fmt::format("now {:.2f}", last));
    }
    if (const Column& steps = run.column("step"); !steps.empty())
      map.x_begin = steps.front() - 1, map.x_end = steps.back();
    out += render(map, "This run has no experts.");
  }
  return out;
}

// Curves over the layers at a few moments, early ones faint.
std::string depth_charts(const std::vector<Run>& runs, const std::string& key, const std::string& what) {
  std::string out;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    Chart chart{.title = what + " by depth: " + run.name,
                .x_label = "layer",
                .y_label = what,
                .log_y = true,
                .whole_x = true};
    std::vector<size_t> rows;
    const ListColumn& lists = run.list(key);
    for (size_t r = 0; r < lists.size(); ++r)
      if (!lists[r].empty()) rows.push_back(r);
    const size_t curves = std::min<size_t>(rows.size(), 5);
    for (size_t c = 0; c < curves; ++c) {
      const size_t row = rows[curves == 1 ? rows.size() - 1 : (rows.size() - 1) * c / (curves - 1)];
      Series s{.name = fmt::format("step {:.0f}", run.column("step")[row]), .colour = colour_of(i)};
      s.strength = 0.25 + 0.75 * static_cast<double>(c + 1) / static_cast<double>(curves);
      for (size_t layer = 0; layer < lists[row].size(); ++layer)
        s.points.push_back({static_cast<double>(layer), lists[row][layer]});
      chart.series.push_back(s);
    }
    out += render(chart, fmt::format("This run recorded no {}.", what));
  }
  return out;
}

Chart over_steps(const std::vector<Run>& runs, const std::string& key, const std::string& title,
                 const std::string& unit) {
  Chart chart{.title = title, .x_label = "step", .y_label = unit, .whole_x = true};
  for (size_t i = 0; i < runs.size(); ++i)
    chart.series.push_back(
        {.name = runs[i].name, .colour = colour_of(i), .points = thin(points_of(runs[i], key), kMostPoints)});
  return chart;
}

struct Number {
  const char *key, *title, *unit;
};
constexpr Number kRewardNumbers[] = {
    {"reward", "Reward", "mean of the step's episodes"},
    {"success", "Success", "share"},
    {"recovery", "Recovery", "solved share of the episodes that met a failing tool"},
    {"calls", "Tool calls", "a task"},
    {"tokens", "Tokens written", "a task"},
    {"entropy", "Entropy", "nats"},
    {"staleness", "Staleness", "updates, mean over tokens"},
    {"masked_share", "Masked share", "tokens without a policy gradient"},
    {"max_dlogp", "Rollout against trainer", "largest difference of log-probabilities"},
    {"eval_success", "Success on held-out tasks", "share"},
};

std::string reward_charts(const std::vector<Run>& runs) {
  std::string out;
  for (const Number& n : kRewardNumbers)
    out += render(over_steps(runs, n.key, n.title, n.unit), "Not recorded in this run.");
  return out;
}

std::string summary_by_reward(const std::vector<Run>& runs) {
  std::string out =
      "<div "
      "class=\"scroll\"><table><tr><th>run</th><th>steps</th><th>reward</th><th>success</th><th>recovery</th>"
      "<th>calls</th><th>tokens</th><th>held-out success</th></tr>";
  for (size_t i = 0; i < runs.size(); ++i) {
    out += fmt::format("<tr><td><i class=\"key b{}\"></i> {}</td><td>{}</td>", colour_of(i),
                       escape(runs[i].name), cell(last_of(runs[i], "step"), "{:.0f}"));
    for (const char* key : {"reward", "success", "recovery", "calls", "tokens", "eval_success"})
      out += fmt::format("<td>{}</td>", cell(last_of(runs[i], key)));
    out += "</tr>";
  }
  return out + "</table></div>\n";
}

// Numbers that have no section of their own.
std::string other_charts(const std::vector<Run>& runs) {
  static const std::set<std::string> kShown = {"step",          "context",      "tokens",
                                               "loss",          "tokens_per_s", "grad_norm",
                                               "held_out_loss", "eval_context", "bits_per_byte"};
  static const std::map<std::string, std::string> kTitles = {
      {"lr", "Learning rate of Muon"},
      {"max_logit", "Largest attention logit"},
      {"clipped_heads", "Heads clipped by QK-Clip"},
      {"vision_grad_norm", "Gradient norm of the vision tower"}};
  std::set<std::string> above = kShown;
  if (runs.front().learns_by_reward())
    for (const Number& n : kRewardNumbers) above.insert(n.key);
  std::set<std::string> keys;
  for (const Run& run : runs)
    for (const auto& [key, column] : run.numbers)
      if (!above.contains(key)) keys.insert(key);
  std::string out;
  for (const std::string& key : keys) {
    std::set<double> values;
    for (const Run& run : runs)
      for (const Point& p : finite(points_of(run, key))) values.insert(p.y);
    const auto title = kTitles.find(key);
    if (values.size() > 1)
      out +=
          render(over_steps(runs, key, title == kTitles.end() ? key : title->second, ""), "No finite value.");
  }
  return out;
}

std::string section(const std::string& title, const std::string& lead, const std::string& inside) {
  return fmt::format("<h2>{}</h2>\n<p class=\"lead\">{}</p>\n{}", escape(title), escape(lead), inside);
}

std::string grid(const std::string& inside) {
  return "<div class=\"grid2\">\n" + inside + "</div>\n";
}

// Runs of reinforcement learning have neither context stages nor held-out text.
std::string reward_sections(const std::vector<Run>& runs) {
  std::string out = summary_by_reward(runs);
  out += section("Reinforcement learning", "Each step's episodes; held-out tasks where they were measured.",
                 grid(reward_charts(runs)));
  std::string episodes;
  for (const Run& run : runs)
    if (!run.episodes.empty())
      episodes += fmt::format("<h3>{}</h3>\n", escape(run.name)) + episodes_html(run.episodes);
  out += section("Episodes",
                 "Of the first and the last step that kept any: what the model read, and what it wrote.",
                 episodes.empty() ? "<p class=\"none\">None were kept.</p>\n" : episodes);
  return out + section("Steps", "Each step as it was measured.", grid(other_charts(runs)));
}

std::string training_sections(const std::vector<Run>& runs) {
  std::string body = summary(runs);
  body += section("Loss",
                  "Dashed lines begin a context stage. Diamonds are gates: the held-out loss at the context "
                  "of the stage before.",
                  grid(render(loss_chart(runs), "No finite loss.") +
                       render(position_chart(runs), "The loss by position is measured when a run ends.")) +
                      gate_table(runs));
  body += section("Experts", "How evenly the router spreads tokens over the routed experts.",
                  grid(load_maps(runs) + vio_maps(runs)));
  body += section("Depth", "Norms by layer at a few moments of the run, the latest in full colour.",
                  grid(depth_charts(runs, "grad_norms", "gradient norm") +
                       depth_charts(runs, "activation_rms", "activation norm (root mean square)")));
  return body + section("Speed and steps", "Each step as it was measured.",
                        grid(render(over_steps(runs, "tokens_per_s", "Throughput", "tokens/s"),
                                    "No throughput was recorded.") +
                             render(over_steps(runs, "grad_norm", "Gradient norm", "before clipping"),
                                    "No gradient norm was recorded.") +
                             other_charts(runs)));
}

}  // namespace

std::string make_page(const std::vector<Run>& runs) {
  std::string title = "Report:";
  for (const Run& run : runs) title += " " + run.name;
  std::string body = fmt::format("<h1>{}</h1>\n", escape(title));
  for (const Run& run : runs)
    for (size_t i = 0; i < run.notes.size() && i < 10; ++i)
      body += fmt::format(
          "<p class=\"note\">{}: {}{}</p>\n", escape(run.name), escape(run.notes[i]),
          i == 9 && run.notes.size() > 10 ? fmt::format("; and {} more", run.notes.size() - 10) : "");
  body += std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.learns_by_reward(); })
              ? reward_sections(runs)
              : training_sections(runs);
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width, "
      "initial-scale=1\">\n<title>{}</title><style>{}</style></head>\n<body><main>\n{}</main></body></"
      "html>\n",
      escape(title), kStyle, body);
}

}  // namespace godwit::report
