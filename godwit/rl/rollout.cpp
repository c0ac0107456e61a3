#include "godwit/rl/rollout.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"
#include "godwit/infer/prompt_media.h"
#include "godwit/io/base64.h"
#include "godwit/text/chat_parser.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

constexpr uint64_t kTaskStream = 0x7461736b, kDrawStream = 0x64726177,  // "task", "draw"
    kChoiceStream = 0x656e76;                                           // "env"

std::string picture_bytes(const std::string& url, const std::string& where) {
  const auto bytes = io::decode_data_url(url, where);
  check(bytes.has_value(), "{}: an environment's picture is a data URL", where);
  return *bytes;
}

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

std::vector<int32_t> encode_task(const Task& task, bool thinking, const Tokenizer& tokenizer) {
  return append_ids(render_chat(task.messages, {.thinking = thinking, .tools = task.tools}), tokenizer);
}

struct Rollouts::Episode {
  Trajectory trajectory;
  std::unique_ptr<Environment> environment;  // none after the end
  int64_t turn_begin = 0;
  uint64_t draw_seed = 0;
  int64_t request = 0;  // of the engine; 0: not there
  bool turn_over = false;
};

struct Rollouts::Group {
  int64_t id = 0;
  uint64_t draw_seed = 0;
  bool fresh = true;  // no episode has drawn anything: one prompt for all
  std::vector<std::unique_ptr<Episode>> episodes;

  [[nodiscard]] bool complete() const {
    return std::all_of(episodes.begin(), episodes.end(), [](const auto& e) { return e->trajectory.done; });
  }
  [[nodiscard]] int64_t oldest_version() const {
    int64_t oldest = std::numeric_limits<int64_t>::max();
    for (const auto& e : episodes) oldest = std::min(oldest, e->trajectory.oldest_version());
    return oldest;
  }
};

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
    group->episodes.push_back(std::move(episode));
    Episode& e = *group->episodes.back();
    if (!task.fault.empty()) {
      end_episode(e, task.fault, 0);
      group->fresh = false;
      continue;
    }
    t.ids = encode_task(task, options_.thinking, model_.tokenizer);
    t.logp.assign(t.ids.size(), 0.0);
    check(static_cast<int64_t>(t.ids.size()) < options_.context,
          "rollout: the task of environment {} has {} tokens, the context holds {}",
          options_.environments[choice].name, t.ids.size(), options_.context);
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
  return request;
}

void Rollouts::begin_segment(Episode& episode) {
  const auto size = static_cast<int64_t>(episode.trajectory.ids.size());
  episode.trajectory.segments.push_back({.begin = size, .end = size, .version = version_});
  episode.turn_over = false;
}

// One choice of the request for each episode.
void Rollouts::ask(Request request, std::vector<Episode*> episodes) {
  Asked asked{.step = engine_steps_, .request = request, .whose = {}, .drawn = {}};
  for (Episode* e : episodes) {
    begin_segment(*e);
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
  const std::string fault = take_pictures(model_, result.messages, t);
  if (!fault.empty()) return end_episode(episode, fault, 0);
  const std::vector<int32_t> next =
      append_ids(render_continuation(parsed.message, result.messages, {.thinking = options_.thinking}),
                 model_.tokenizer);
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
  for (const auto& group : groups_)
    for (const auto& e : group->episodes)
      if (e->request != 0) engine_.abort(e->request);
  engine_.step();
}

std::vector<std::vector<Trajectory>> Rollouts::run(
    int64_t version, const std::function<void(const RolloutProgress&)>& progress) {
  version_ = version;
  drawn_ = 0;
  asked_.clear();
  engine_steps_ = 0;
  engine_.forget_prefixes();
  while (static_cast<int64_t>(groups_.size()) < options_.groups) start_group();
  for (const auto& group : groups_) {
    if (group->fresh) {
      submit_group(*group);
      continue;
    }
    for (const auto& e : group->episodes)
      if (!e->trajectory.done) submit(*e);
  }
  bool more = true;
  while (more && !may_stop()) {
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
      progress(p);
    }
  }
  suspend();
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

json Rollouts::save() const {
  json groups = json::array();
  for (const auto& group : groups_) {
    json episodes = json::array();
    for (const auto& e : group->episodes) {
      episodes.push_back({{"trajectory", e->trajectory},
                          {"turn_begin", e->turn_begin},
                          {"draw_seed", e->draw_seed},
                          {"turn_over", e->turn_over},
                          {"environment", e->environment ? json(e->environment->save()) : json()}});
    }
    groups.push_back({{"id", group->id},
                      {"draw_seed", group->draw_seed},
                      {"fresh", group->fresh},
                      {"episodes", episodes}});
  }
  return {{"next_group", next_group_}, {"groups", groups}};
}

void Rollouts::load(const json& saved) {
  next_group_ = saved.at("next_group");
  groups_.clear();
  for (const json& g : saved.at("groups")) {
    auto group = std::make_unique<Group>();
    group->id = g.at("id");
    group->draw_seed = g.at("draw_seed");
    group->fresh = g.at("fresh");
    for (const json& e : g.at("episodes")) {
      auto episode = std::make_unique<Episode>();
      episode->trajectory = e.at("trajectory").get<Trajectory>();
      for (const std::string& url : episode->trajectory.pictures)
        episode->trajectory.media.push_back(
            read_image(model_, picture_bytes(url, "checkpoint"), "checkpoint"));
      episode->turn_begin = e.at("turn_begin");
      episode->draw_seed = e.at("draw_seed");
      episode->turn_over = e.at("turn_over");
      if (!e.at("environment").is_null()) {
        episode->environment = make(static_cast<size_t>(episode->trajectory.environment));
        episode->environment->load(e.at("environment").get<std::string>());
      }
      group->episodes.push_back(std::move(episode));
    }
    groups_.push_back(std::move(group));
  }
}

}  // namespace godwit::rl
