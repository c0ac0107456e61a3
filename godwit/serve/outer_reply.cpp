#include "godwit/serve/outer_reply.h"

#include <algorithm>

namespace godwit::serve {
namespace {

bool is_allowed(const std::string& origin, const std::vector<std::string>& allowed) {
  return std::any_of(allowed.begin(), allowed.end(),
                     [&](const std::string& one) { return one == "*" || one == origin; });
}

}  // namespace

std::string header_of(const HttpRequest& request, const std::string& name) {
  const auto it = request.headers.find(name);
  return it == request.headers.end() ? std::string() : it->second;
}

// Sec-Fetch-Site cannot be set by a page, and what is no browser does not send it.
bool is_foreign(const HttpRequest& request, const std::vector<std::string>& allowed) {
  const std::string site = header_of(request, "sec-fetch-site");
  return (site == "cross-site" || site == "same-site") && !is_allowed(header_of(request, "origin"), allowed);
}

Headers origin_headers(const HttpRequest& request, const std::vector<std::string>& allowed) {
  if (allowed.empty()) return {};
  const std::string origin = header_of(request, "origin");
  if (origin.empty() || !is_allowed(origin, allowed)) return {{"vary", "origin"}};
  return {{"vary", "origin"},
          {"access-control-allow-origin", origin},
          {"access-control-expose-headers", "x-request-id, retry-after"}};
}

Headers preflight_headers(const HttpRequest& request, const std::vector<std::string>& allowed) {
  if (!is_allowed(header_of(request, "origin"), allowed)) return {};
  const std::string asked = header_of(request, "access-control-request-headers");
  return {{"access-control-allow-methods", "GET, HEAD, POST, OPTIONS"},
          {"access-control-allow-headers", asked.empty() ? "authorization, content-type" : asked},
          {"access-control-max-age", "600"}};
}

}  // namespace godwit::serve
