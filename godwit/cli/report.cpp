// `godwit report`: one HTML page with the plots of one or several runs.
#include <filesystem>
#include <vector>

#include "godwit/base/file.h"
#include "godwit/base/log.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/report/page.h"
#include "godwit/report/run.h"

namespace godwit::cli {

int run_report(const ReportArgs& args) {
  std::vector<report::Run> runs;
  for (const std::string& directory : args.runs) {
    runs.push_back(report::read_run(directory));
    for (const std::string& note : runs.back().notes) log_warn("{}: {}", directory, note);
  }
  const std::string out =
      args.out.empty() ? (std::filesystem::path(args.runs.front()) / "report.html").string() : args.out;
  write_file(out, report::make_page(runs));
  print_out("{}\n", out);
  return 0;
}

}  // namespace godwit::cli
