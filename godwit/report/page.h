// The page of one or several runs: one HTML text without any outside request or script.
#pragma once

#include <string>
#include <vector>

#include "godwit/report/run.h"

namespace godwit::report {

std::string make_page(const std::vector<Run>& runs);

// The page's style sheet: colours of light and dark as variables, classes of chart.h.
extern const char* const kStyle;

}  // namespace godwit::report
