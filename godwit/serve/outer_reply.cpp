#include "godwit/serve/outer_reply.h"

#include <algorithm>

namespace godwit::serve {
namespace {

bool is_allowed(const std::string& origin, const std::vector<std::string>& allowed) {
  return std::any_of(allowed.begin(), allowed.end(),
                     [&](const std::string& one) { return one == "*" || one == origin; });
}

// A name or address of this machine alone, with or without a port.
bool is_local(const std::string& host) {
  const std::string name =
      host.starts_with('[') ? host.substr(0, host.find(']') + 1) : host.substr(0, host.find(':'));
  return name == "localhost" || name.ends_with(".localhost") || name == "[::1]" ||
         (name.starts_with("127.") && name.find_first_not_of("0123456789.") == name.npos);
}

}  // namespace

std::string header_of(const HttpRequest& request, const std::string& name) {
  const auto it = request.headers.find(name);
  return it == request.headers.end() ? std::string() : it->second;
}

// Sec-Fetch-Site cannot be set by a page, but is sent to addresses alone that a browser trusts. Origin comes
// with every POST of a page.
bool is_foreign(const HttpRequest& request, const OriginRules& rules) {
  const std::string site = header_of(request, "sec-fetch-site"), origin = header_of(request, "origin");
  if (is_allowed(origin, rules.allowed) || (origin.empty() && site.empty())) return false;
  if (site == "cross-site" || site == "same-site") return true;
  if (origin.empty()) return false;
  const std::string host = header_of(request, "host");
  if (rules.local_names_only && !is_local(host)) return true;
  const size_t scheme = origin.find("://");
  return site != "same-origin" && (scheme == origin.npos || origin.substr(scheme + 3) != host);
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
