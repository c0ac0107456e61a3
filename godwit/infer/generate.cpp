#include "godwit/infer/generate.h"

#include <chrono>
#include <utility>

#include "godwit/base/check.h"

namespace godwit {

Generation generate(Engine& engine, Request request) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  };
  Generation out;
  bool ended = false;
  const auto start = Clock::now();
  auto first = start;
  request.on_token = [&, watch = std::move(request.on_token)](int64_t choice, const DrawnToken& token) {
    if (choice == 0) {
      if (out.ids.empty()) first = Clock::now();
      out.ids.push_back(token.id);
      out.logprobs.push_back(token.logprob);
    }
    return !watch || watch(choice, token);
  };
  request.on_finish = [&, watch = std::move(request.on_finish)](int64_t choice, const Finish& finish) {
    if (choice == 0) {
      out.finish = finish;
      ended = true;
    }
    if (watch) watch(choice, finish);
  };
  engine.submit(std::move(request));
  while (!ended) engine.step();
  check(!failed(out.finish.reason), "{}", out.finish.error);
  if (out.ids.empty()) first = Clock::now();
  out.prefill_s = seconds(start, first);
  out.decode_s = seconds(first, Clock::now());
  return out;
}

}  // namespace godwit
