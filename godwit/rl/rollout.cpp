#include "godwit/rl/rollout.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"
#include "godwit/infer/prompt_media.h"
#include "godwit/io/base64.h"
#include "godwit/rl/rollout_episode.h"
#include "godwit/text/chat_parser.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

constexpr uint64_t kTaskStream = 0x7461736b, kDrawStream = 0x64726177,  // "task", "draw"
    kChoiceStream = 0x656e76;                                           // "env"

// The messages' pictures join the trajectory; their parts get what the prompt says of them. What is wrong
// with them, in a line, or nothing.
std::string take_pictures(const LoadedModel& model, std::vector<ChatMessage>& messages, Trajectory& t) {
  std::vector<std::string> urls;
  for (const ChatMessage& message : messages)
    for (const ChatPart& part : message.content)
      if (part.is_image) urls.push_back(part.image_url);
  if (urls.empty()) return "";
  try {
    const MediaList media = read_images(model, messages, picture_bytes);
    t.media.insert(t.media.end(), media.begin(), media.end());
    t.pictures.insert(t.pictures.end(), urls.begin(), urls.end());
  } catch (const Error& error) {
    return std::string("environment: ") + error.what();
  }
  return "";
}

std::vector<int32_t> append_ids(const std::vector<ChatSegment>& segments, const Tokenizer& tokenizer) {
  return encode_chat(segments, tokenizer).ids;
}

}  // namespace

std::string picture_bytes(const std::string& url, const std::string& where) {
  const auto bytes = io::decode_data_url(url, where);
  check(bytes.has_value(), "{}: an environment's picture is a data URL", where);
  return *bytes;
}

// What an environment's messages are refused for ends its episode and not the run: in words, or nothing.
template <class F>
std::string in_words(const F& read_messages) {
  try {
    read_messages();
  } catch (const Error& error) {
    return std::string("environment: ") + error.what();
  }
  return "";
}

std::vector<int32_t> encode_task(const Task& task, bool thinking, const Tokenizer& tokenizer) {
  return append_ids(render_chat(task.messages, {.thinking = thinking, .tools = task.tools}), tokenizer);
}

Rollouts::Rollouts(const LoadedModel& model, RolloutOptions options)
    : model_(model),
      options_(std::move(options)),
      engine_(model, {.max_sequences = options_.concurrent,
                      .max_context = options_.context,
                      // Every sequence at full length, and as much again for prefixes that are shared.
                      .cache_tokens = 2 * options_.concurrent * options_.context,
                      .prefill_tokens = options_.prefill_tokens}) {
  for (const std::string_view name : {kOpen, kClose, kSep, kEndOfMsg})
    specials_.push_back(model.tokenizer.special_id(name));
  end_id_ = specials_.back();
  check(!options_.environments.empty(), "rollout: no environment");
  for (size_t i = 0; i < options_.environments.size(); ++i) make(i);  // bad options end the run here
}

Rollouts::~Rollouts() = default;

std::unique_ptr<Environment> Rollouts::make(size_t choice) const {
  const EnvironmentChoice& c = options_.environments.at(choice);
  return make_environment(c.name, json::parse(c.options));
}

size_t Rollouts::choose(int64_t group) const {
  double total = 0;
  for (const EnvironmentChoice& c : options_.environments) total += c.weight;
  double left = random_uniform(options_.seed, kChoiceStream, static_cast<uint64_t>(group)) * total;
  for (size_t i = 0; i + 1 < options_.environments.size(); ++i) {
    left -= options_.environments[i].weight;
    if (left < 0) return i;
  }
  return options_.environments.size() - 1;
}

void Rollouts::start_group() {
  auto group = std::make_unique<Group>();
  group->id = next_group_++;
  group->draw_seed = random_bits(options_.seed, kDrawStream, static_cast<uint64_t>(group->id));
  const size_t choice = choose(group->id);
  for (int64_t k = 0; k < options_.samples; ++k) {
    auto episode = std::make_unique<Episode>();
    Trajectory& t = episode->trajectory;
    t.task_seed = random_bits(options_.seed, kTaskStream, static_cast<uint64_t>(group->id));
    t.environment = static_cast<int64_t>(choice);
    t.group = group->id;
    t.sample = k;
    episode->environment = make(choice);
    Task task = episode->environment->reset(t.task_seed);
    t.base_tokens = task.base_tokens;
    if (task.fault.empty()) task.fault = take_pictures(model_, task.messages, t);
    if (task.fault.empty()) {
      task.fault = in_words([&] { t.ids = encode_task(task, options_.thinking, model_.tokenizer); });
      if (const auto size = static_cast<int64_t>(t.ids.size()); size >= options_.context) {
        task.fault =
            fmt::format("environment: a task of {} tokens, the context holds {}", size, options_.context);
        t.ids.clear();
      }
    }
    group->episodes.push_back(std::move(episode));
    Episode& e = *group->episodes.back();
    if (!task.fault.empty()) {
      end_episode(e, task.fault, 0);
      group->fresh = false;
      continue;
    }
    t.logp.assign(t.ids.size(), 0.0);
    e.turn_begin = static_cast<int64_t>(t.ids.size());
    e.draw_seed = choice_seed(group->draw_seed, k);
    if (t.ids != group->episodes.front()->trajectory.ids ||
        t.pictures != group->episodes.front()->trajectory.pictures)
      group->fresh = false;  // an environment that draws lots
  }
  groups_.push_back(std::move(group));
}

Request Rollouts::request_for(const Episode& episode) const {
  const auto size = static_cast<int64_t>(episode.trajectory.ids.size());
  Request request;
  request.prompt = episode.trajectory.ids;
  request.media = episode.trajectory.media;
  request.sampling.temperature = options_.temperature;
  request.sampling.seed = episode.draw_seed;
  request.sampling.policy_logprob = true;
  request.max_tokens = std::min(options_.turn_tokens - (size - episode.turn_begin), options_.context - size);
  request.allowed_specials = specials_;
  request.state = episode.state;
  return request;
}

// What a state of older weights may still be used for.
void Rollouts::drop_old_state(Episode& episode) const {
  const int64_t age = version_ - episode.state_version;
  if (age > (options_.keep_states ? options_.max_staleness : 0)) episode.state.reset();
}

// At the end of what the engine does for it: at a pause; and between turns where older weights read its
// beginning, so that the next turn need not read it again.
bool Rollouts::keeps_state(const Episode& episode) const {
  return suspending_ || (options_.keep_states && episode.reading < version_);
}

void Rollouts::begin_segment(Episode& episode) {
  const auto size = static_cast<int64_t>(episode.trajectory.ids.size());
  auto& segments = episode.trajectory.segments;
  episode.reading = episode.state ? episode.state_version : version_;
  episode.turn_over = false;
  // From its own state, by the same weights: no new beginning.
  const bool same = episode.state && !segments.empty() && segments.back().end == size &&
                    segments.back().version == version_ && segments.back().state == episode.reading;
  episode.state.reset();
  if (!same) segments.push_back({.begin = size, .end = size, .version = version_, .state = episode.reading});
}

// One choice of the request for each episode.
void Rollouts::ask(Request request, std::vector<Episode*> episodes) {
  Asked asked{.step = engine_steps_, .request = request, .whose = {}, .drawn = {}};
  for (Episode* e : episodes) {
    begin_segment(*e);
    e->order = next_order_++;
    asked.whose.emplace_back(e->trajectory.group, e->trajectory.sample);
  }
  asked.drawn.resize(episodes.size());
  const size_t place = asked_.size();
  asked_.push_back(std::move(asked));
  request.on_token = [this, episodes, place](int64_t choice, const DrawnToken& token) {
    asked_[place].drawn[choice].push_back(token.id);
    return take(*episodes[choice], token);
  };
  request.on_finish = [this, episodes](int64_t choice, const Finish& f) { finish(*episodes[choice], f); };
  request.keep_state = [this, episodes](int64_t choice) { return keeps_state(*episodes[choice]); };
  const int64_t id = engine_.submit(std::move(request));
  for (Episode* e : episodes) e->request = id;
}

// All of a new group's episodes read one prompt once.
void Rollouts::submit_group(Group& group) {
  group.fresh = false;
  Request request = request_for(*group.episodes.front());
  request.sampling.seed = group.draw_seed;  // choice k draws with choice_seed(seed, k)
  request.choices = options_.samples;
  std::vector<Episode*> episodes;
  for (const auto& episode : group.episodes) episodes.push_back(episode.get());
  ask(std::move(request), std::move(episodes));
}

void Rollouts::submit(Episode& episode) {
  Request request = request_for(episode);
  if (request.max_tokens <= 0) return end_episode(episode, "length", 0);
  ask(std::move(request), {&episode});
}

bool Rollouts::take(Episode& episode, const DrawnToken& token) {
  Trajectory& t = episode.trajectory;
  t.ids.push_back(token.id);
  t.logp.push_back(token.policy_logprob);
  ++t.segments.back().end;
  ++drawn_;
  episode.turn_over = token.id == end_id_;
  return !episode.turn_over;
}

void Rollouts::finish(Episode& episode, const Finish& finish) {
  episode.request = 0;
  episode.state = finish.state;
  episode.state_version = episode.reading;
  Trajectory& t = episode.trajectory;
  if (t.segments.back().begin == t.segments.back().end) t.segments.pop_back();
  if (episode.turn_over) {
    ready_.push_back(&episode);
  } else if (finish.reason == FinishReason::kLength) {
    end_episode(episode, "length", 0);
  } else if (finish.reason == FinishReason::kNoRoom) {
    end_episode(episode, "room", 0);
  } else if (finish.reason == FinishReason::kError) {
    error_ = finish.error;
  }  // else suspended: it goes on in the next phase
}

void Rollouts::end_episode(Episode& episode, const std::string& reason, double success) {
  Trajectory& t = episode.trajectory;
  const auto size = static_cast<int64_t>(t.ids.size());
  // A turn that was cut off is a turn: its tokens are trained on.
  if (!episode.turn_over && size > episode.turn_begin) {
    t.turns.push_back({.begin = episode.turn_begin, .end = size, .state = episode.environment->state_hash()});
  }
  t.done = true;
  t.reason = reason;
  t.success = success;
  episode.environment.reset();
  episode.state.reset();
}

// The model has written a whole turn: the environment answers.
void Rollouts::end_turn(Episode& episode) {
  Trajectory& t = episode.trajectory;
  TurnRecord turn{.begin = episode.turn_begin,
                  .end = static_cast<int64_t>(t.ids.size()),
                  .state = episode.environment->state_hash()};
  ParsedTurn parsed = parse_turn(model_.tokenizer, std::span(t.ids).subspan(static_cast<size_t>(turn.begin)),
                                 options_.thinking);
  turn.malformed = static_cast<int64_t>(parsed.faults.size());
  for (size_t i = 0; i < parsed.message.tool_calls.size(); ++i) {
    ChatToolCall& call = parsed.message.tool_calls[i];
    call.id = "call_" + std::to_string(i);
    if (call.name.empty()) call.name = "unnamed";
  }
  StepResult result = episode.environment->step(parsed.message);
  turn.reward = result.reward;
  turn.calls = result.calls;
  turn.faults = result.faults;
  turn.wrong = result.wrong;
  turn.redundant = result.redundant;
  turn.checked = result.checked;
  turn.valid = result.valid;
  t.turns.push_back(turn);
  if (result.done) return end_episode(episode, result.reason, result.success);
  std::string fault = take_pictures(model_, result.messages, t);
  std::vector<int32_t> next;
  if (fault.empty()) {
    fault = in_words([&] {
      next = append_ids(render_continuation(parsed.message, result.messages, {.thinking = options_.thinking}),
                        model_.tokenizer);
    });
  }
  if (!fault.empty()) return end_episode(episode, fault, 0);
  if (static_cast<int64_t>(t.ids.size() + next.size()) >= options_.context)
    return end_episode(episode, "length", 0);
  t.ids.insert(t.ids.end(), next.begin(), next.end());
  t.logp.resize(t.ids.size(), 0.0);
  episode.turn_begin = static_cast<int64_t>(t.ids.size());
  submit(episode);
}

bool Rollouts::may_stop() const {
  int64_t finished = 0, complete = 0;
  for (const auto& group : groups_) {
    for (const auto& e : group->episodes) finished += e->trajectory.done;
    complete += group->complete();
    if (!group->complete() && group->oldest_version() <= version_ - options_.max_staleness) return false;
  }
  return complete > 0 && static_cast<double>(finished) >= options_.finish_share *
                                                              static_cast<double>(options_.groups) *
                                                              static_cast<double>(options_.samples);
}

// Takes what still runs out of the engine.
void Rollouts::suspend() {
  suspending_ = paused_ || options_.keep_states;
  for (const auto& group : groups_)
    for (const auto& e : group->episodes)
      if (e->request != 0) engine_.abort(e->request);
  engine_.step();
  suspending_ = false;
}

// New groups, and those that were suspended in the order in which the engine had them.
void Rollouts::go_on() {
  while (static_cast<int64_t>(groups_.size()) < options_.groups) start_group();
  std::vector<Episode*> suspended;
  for (const auto& group : groups_)
    for (const auto& e : group->episodes)
      if (!group->fresh && !e->trajectory.done) suspended.push_back(e.get());
  std::stable_sort(suspended.begin(), suspended.end(),
                   [](const Episode* a, const Episode* b) { return a->order < b->order; });
  for (Episode* e : suspended) {
    drop_old_state(*e);
    submit(*e);
  }
  for (const auto& group : groups_)
    if (group->fresh) submit_group(*group);
}

std::vector<std::vector<Trajectory>> Rollouts::take_complete() {
  std::vector<std::vector<Trajectory>> out;
  for (const auto& group : groups_) {
    if (!group->complete()) continue;
    out.emplace_back();
    for (const auto& e : group->episodes) out.back().push_back(std::move(e->trajectory));
    group->episodes.clear();
  }
  std::erase_if(groups_, [](const auto& group) { return group->episodes.empty(); });
  return out;
}

std::vector<std::vector<Trajectory>> Rollouts::run(
    int64_t version, const std::function<bool(const RolloutProgress&)>& progress) {
  version_ = version;
  drawn_ = 0;
  paused_ = false;
  asked_.clear();
  engine_steps_ = 0;
  engine_.forget_prefixes();
  go_on();
  bool more = true;
  while (more && !may_stop() && !paused_) {
    more = engine_.step();
    ++engine_steps_;
    check(error_.empty(), "rollout: {}", error_);
    std::vector<Episode*> ready;
    ready.swap(ready_);
    for (Episode* episode : ready) end_turn(*episode);
    more = more || !ready.empty();
    if (progress) {
      RolloutProgress p{.drawn = drawn_};
      for (const auto& group : groups_)
        for (const auto& e : group->episodes) ++(e->trajectory.done ? p.finished : p.active);
      paused_ = !progress(p) && more && !may_stop();
    }
  }
  suspend();
  if (paused_) return {};
  return take_complete();
}

std::vector<const Trajectory*> Rollouts::waiting() const {
  std::vector<const Trajectory*> out;
  for (const auto& group : groups_) {
    for (const auto& e : group->episodes) {
      const auto& segments = e->trajectory.segments;
      if (std::any_of(segments.begin(), segments.end(), [&](const Segment& s) { return s.is_of(version_); }))
        out.push_back(&e->trajectory);
    }
  }
  return out;
}

Rollouts::Repeated Rollouts::repeat() {
  engine_.forget_prefixes();
  Repeated out;
  std::string error;
  std::vector<int64_t> running;
  size_t next = 0;
  for (int64_t step = 0; step < engine_steps_; ++step) {
    for (; next < asked_.size() && asked_[next].step == step; ++next) {
      const Asked& asked = asked_[next];
      Request request = asked.request;
      request.forced = [&asked](int64_t choice, int64_t n) { return asked.drawn[choice][n]; };
      const auto begin = static_cast<int64_t>(request.prompt.size());
      // Each choice's tokens are counted by what is there already of this request.
      auto counts = std::make_shared<std::vector<int64_t>>(asked.drawn.size(), 0);
      request.on_token = [&out, &asked, counts, begin](int64_t choice, const DrawnToken& token) {
        int64_t& n = (*counts)[choice];
        out[asked.whose[choice]].push_back({.at = begin + n, .logp = token.policy_logprob});
        return ++n < static_cast<int64_t>(asked.drawn[choice].size());
      };
      request.on_finish = [&error](int64_t, const Finish& f) {
        if (failed(f.reason)) error = f.error;
      };
      running.push_back(engine_.submit(std::move(request)));
    }
    engine_.step();
    check(error.empty(), "rollout: repeated, {}", error);
  }
  for (const int64_t request : running) engine_.abort(request);
  engine_.step();
  engine_.forget_prefixes();
  return out;
}

int64_t Rollouts::suspended() const {
  int64_t count = 0;
  for (const auto& group : groups_)
    for (const auto& e : group->episodes) count += !e->trajectory.done;
  return count;
}

}  // namespace godwit::rl
