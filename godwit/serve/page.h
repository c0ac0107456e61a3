// web/index.html, built in.
#pragma once

#include <string_view>

namespace godwit::serve {

std::string_view page();

}  // namespace godwit::serve
