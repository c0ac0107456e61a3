#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <regex>

#include "godwit/base/check.h"
#include "godwit/report/chart.h"
#include "godwit/report/page.h"
#include "godwit/report/run.h"
#include "tests/support/files.h"

namespace godwit::report {
namespace {

constexpr const char* kRows =
    R"({"step":1,"stage":"short","context":128,"tokens":1024,"loss":5.5,"lr":0.01,"grad_norm":2.5,"tokens_per_s":512.0,"max_vio":[1.5,2.25],"dead_experts":[0,3],"activation_rms":[0.1,0.2,0.4],"grad_norms":[1.0,0.5,0.25]}
{"step":2,"stage":"short","context":128,"tokens":2048,"loss":5.0,"lr":0.02,"grad_norm":2.0,"tokens_per_s":1024.0,"max_vio":[1.25,1.75],"dead_experts":[0,0],"activation_rms":[0.1,0.3,0.5],"grad_norms":[0.5,0.5,0.5]}
{"step":3,"stage":"long","context":512,"tokens":3072,"loss":4.75,"lr":0.01,"grad_norm":1.5,"tokens_per_s":1024.0,"max_vio":[1.0,0.75],"dead_experts":[0,1],"activation_rms":[0.2,0.3,0.6],"grad_norms":[0.4,0.3,0.2],"held_out_loss":4.9,"bits_per_byte":2.125,"eval_context":512}
)";
constexpr const char* kRecord =
    R"({"gates":[{"stage":"long","context":128,"before":4.95,"after":4.97,"limit":0.1,"step":3}],
"loss_by_position":[[0,64,5.5],[64,512,4.5]],"expert_load":[[1.0,0.0,2.0,6.0],[1.0,1.0,1.0,1.0]]})";

class Report : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::string& name, const std::string& metrics,
                              const std::string& record = "") {
    const std::filesystem::path run = dir_.path() / name;
    std::filesystem::create_directories(run);
    std::ofstream(run / "metrics.jsonl") << metrics;
    if (!record.empty()) std::ofstream(run / "record.json") << record;
    return run;
  }
  static std::string fault(const std::filesystem::path& run) {
    try {
      read_run(run);
    } catch (const Error& e) {
      return e.what();
    }
    return "none";
  }

  testing::ScratchDir dir_;
};

bool has(const std::string& page, const std::string& text) {
  return page.find(text) != std::string::npos;
}

TEST_F(Report, HasEverySectionAndTheNumbers) {
  const std::string page = make_page({read_run(write("run-a", kRows, kRecord))});
  for (const char* part :
       {"Loss by stage", "Loss by position", "Expert load: run-a", "MaxVio by layer: run-a",
        "gradient norm by depth", "activation norm (root mean square) by depth", "Throughput",
        "Gradient norm", "short (128)", "long (512)"})
    EXPECT_TRUE(has(page, part)) << part;
  // Steps, tokens, loss, held-out loss, bits a byte, MaxVio, dead experts of the last rows.
  EXPECT_TRUE(has(page,
                  "<td>3</td><td>3072</td><td>4 s</td><td>768</td><td>4.750</td><td>4.900</td><td>2.125</td>"
                  "<td>1.00</td><td>1</td>"));
  EXPECT_TRUE(has(page, "<td>4.9500</td><td>4.9700</td><td>+0.1</td><td class=\"good-text\">passed</td>"));
  EXPECT_TRUE(has(page, "max 6.0"));             // load of layer 0
  EXPECT_TRUE(has(page, "class=\"q0\" d=\"M"));  // an expert without a token
  EXPECT_TRUE(has(page, "now 0.75"));            // MaxVio of layer 1
  EXPECT_TRUE(has(page, "prefers-color-scheme: dark"));
  EXPECT_FALSE(has(page, "class=\"tick middle\">0.5<"));  // there is no layer 0.5
}

TEST_F(Report, AsksForNothingOutside) {
  const std::string page = make_page({read_run(write("a", kRows, kRecord))});
  for (const char* outside : {"http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link"})
    EXPECT_FALSE(has(page, outside)) << outside;
}

TEST_F(Report, PutsRunsSideBySide) {
  const std::string page =
      make_page({read_run(write("first", kRows, kRecord)), read_run(write("second", kRows))});
  EXPECT_TRUE(has(page, "MaxVio by layer: first"));
  EXPECT_TRUE(has(page, "MaxVio by layer: second"));
  EXPECT_TRUE(has(page, "line c0"));
  EXPECT_TRUE(has(page, "line c1"));
  EXPECT_TRUE(has(page, "This run recorded no expert load"));
}

TEST_F(Report, LeavesOutALineThatWasCutShort) {
  const report::Run run = read_run(write("cut", std::string(kRows) + R"({"step":4,"stage":"lo)"));
  EXPECT_EQ(run.rows(), 3u);
  ASSERT_EQ(run.notes.size(), 1u);
  EXPECT_TRUE(has(run.notes[0], "line 4 of metrics.jsonl was cut short"));
  EXPECT_TRUE(has(make_page({run}), "line 4 of metrics.jsonl was cut short"));
}

TEST_F(Report, NamesWhatIsNotFinite) {
  const std::string rows =
      std::string(kRows) +
      R"({"step":4,"stage":"long","tokens":4096,"loss":null,"grad_norm":null,"max_vio":[null,1.0]})" + "\n";
  const report::Run run = read_run(write("nan", rows));
  EXPECT_TRUE(std::isnan(run.column("loss")[3]));
  ASSERT_EQ(run.notes.size(), 2u);
  EXPECT_EQ(run.notes[0], "step 4: loss is not a finite number");
  const std::string page = make_page({run});
  EXPECT_FALSE(std::regex_search(page, std::regex(R"(d="[^"]*nan)")));  // no broken path
  EXPECT_FALSE(std::regex_search(page, std::regex(R"(d="[^"]*inf)")));
}

TEST_F(Report, FaultsAreOneClearLine) {
  EXPECT_TRUE(has(fault(dir_.path() / "none"), "no such run directory"));
  std::filesystem::create_directories(dir_.path() / "bare");
  EXPECT_TRUE(has(fault(dir_.path() / "bare"), "has no metrics.jsonl"));
  EXPECT_TRUE(has(fault(write("empty", "")), "holds no finished step"));
  EXPECT_TRUE(has(fault(write("bad", "{\"step\":1}\nrubbish\n{\"step\":2}\n")),
                  "metrics.jsonl:2: expected a JSON object"));
  EXPECT_TRUE(
      has(fault(write("nostep", "{\"loss\":1}\n")), "metrics.jsonl:1: expected a JSON object with a step"));
  EXPECT_TRUE(has(fault(write("record", kRows, "[]")), "record.json: expected a JSON object"));
}

TEST_F(Report, ReinforcementLearningHasItsOwnNumbers) {
  const std::string page = make_page({read_run(write("rl",
                                                     "{\"step\":1,\"reward\":0.25,\"success\":0.5}\n"
                                                     "{\"step\":2,\"reward\":0.5,\"success\":0.75}\n"))});
  EXPECT_TRUE(has(page, "<figcaption>Reward</figcaption>"));
  EXPECT_FALSE(has(page, "Loss by stage"));
  EXPECT_TRUE(has(page, "<figcaption>Success</figcaption>"));
}

TEST_F(Report, NamesAreText) {
  const std::string page = make_page({read_run(write("a<b>&\"c", kRows))});
  EXPECT_FALSE(has(page, "a<b>"));
  EXPECT_TRUE(has(page, "a&lt;b&gt;&amp;&quot;c"));
}

TEST_F(Report, EpisodesAreReadTurnByTurn) {
  const auto run = write(
      "rl", "{\"step\":1,\"reward\":0.25,\"success\":0.5}\n{\"step\":9,\"reward\":0.5,\"success\":0.75}\n");
  std::filesystem::create_directories(run / "trajectories");
  const auto keep = [&](const std::string& name, const std::string& before) {
    testing::put_file(
        run / "trajectories" / name,
        R"([{"group":3,"sample":1,"reward":0.5,"success":1,"reason":"answered","turns":[{"before":")" +
            before + R"(","written":"<|open|>call tool=","calls":1,"faults":1,"reward":0.25}]}])");
  };
  keep("step-1.json", "first task");
  keep("step-2.json", "passed over");
  keep("step-10.json", "last task " + std::string(10000, 'x'));
  const auto read = read_run(run);
  ASSERT_EQ(read.episodes.size(), 2u);
  EXPECT_EQ(read.episodes[1].step, 10);  // by number, not by name
  const std::string page = make_page({read});
  EXPECT_TRUE(has(page, "first task"));
  EXPECT_FALSE(has(page, "passed over"));
  EXPECT_TRUE(has(page, "&lt;|open|&gt;call tool="));
  EXPECT_TRUE(has(page, "… 6010 bytes …"));
  EXPECT_TRUE(has(page, "1 calls, 1 of them failed"));
  testing::put_file(run / "trajectories/step-1.json", "[7]");
  EXPECT_NE(fault(run).find("step-1.json"), std::string::npos);
}

TEST(Thin, KeepsPeaks) {
  std::vector<Point> points;
  for (int i = 0; i < 10000; ++i) points.push_back({static_cast<double>(i), i == 4321 ? 100.0 : std::sin(i)});
  const std::vector<Point> few = thin(points, 200);
  EXPECT_LE(few.size(), 200u);
  EXPECT_TRUE(std::any_of(few.begin(), few.end(), [](const Point& p) { return p.y == 100.0; }));
  EXPECT_TRUE(
      std::is_sorted(few.begin(), few.end(), [](const Point& a, const Point& b) { return a.x < b.x; }));
}

TEST(Smooth, OfAConstantIsTheConstant) {
  const std::vector<Point> flat(50, Point{0, 2.5});
  for (const Point& p : smooth(flat, 10)) EXPECT_NEAR(p.y, 2.5, 1e-12);
}

}  // namespace
}  // namespace godwit::report
