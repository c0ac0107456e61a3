// "sql": questions about a table, answered with queries that can only read.
#if GODWIT_WITH_SQLITE
#include <sqlite3.h>
#endif

#include <algorithm>

#include "godwit/base/check.h"
#include "godwit/rl/environments.h"
#include "godwit/rl/tool_environment.h"

namespace godwit::rl {

#if GODWIT_WITH_SQLITE
namespace {

using nlohmann::json;

const char* const kNames[] = {"Ada", "Ben",  "Cleo", "Dan",  "Eva", "Finn",
                              "Gus", "Hana", "Ivo",  "Jana", "Kai", "Lea"};
const char* const kCities[] = {"Oslo", "Rome", "Lima", "Bonn"};

struct Options {
  int64_t people = 8, turns = 8;
  double failure = 0, give_up = 0;
};

// A database in memory. One query at a time, bounded in work, rows and text; nothing but reading.
class Database {
 public:
  explicit Database(const json& people) {
    check(sqlite3_open(":memory:", &db_) == SQLITE_OK, "environment sql: SQLite cannot open a database");
    run("CREATE TABLE people (name TEXT, city TEXT, age INTEGER)");
    for (const json& p : people) {
      run("INSERT INTO people VALUES ('" + p.at("name").get<std::string>() + "', '" +
          p.at("city").get<std::string>() + "', " + std::to_string(p.at("age").get<int64_t>()) + ")");
    }
    sqlite3_limit(db_, SQLITE_LIMIT_LENGTH, 1 << 16);
    sqlite3_limit(db_, SQLITE_LIMIT_ATTACHED, 0);
    sqlite3_set_authorizer(
        db_,
        [](void*, int action, const char*, const char*, const char*, const char*) {
          return action == SQLITE_SELECT || action == SQLITE_READ || action == SQLITE_FUNCTION ? SQLITE_OK
                                                                                               : SQLITE_DENY;
        },
        nullptr);
    constexpr int kOperations = 100000;
    sqlite3_progress_handler(
        db_, kOperations, [](void*) { return 1; }, nullptr);
  }
  ~Database() { sqlite3_close(db_); }
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;

  // Rows as lines, values separated by |. False: `out` says what is wrong.
  bool query(const std::string& sql, std::string& out) {
    sqlite3_stmt* statement = nullptr;
    bool good =
        sqlite3_prepare_v2(db_, sql.c_str(), static_cast<int>(sql.size()), &statement, nullptr) == SQLITE_OK;
    constexpr int kMostRows = 20;
    int state = SQLITE_DONE;
    for (int row = 0; good && statement && (state = sqlite3_step(statement)) == SQLITE_ROW && row < kMostRows;
         ++row) {
      for (int c = 0; c < sqlite3_column_count(statement); ++c) {
        const auto* text = reinterpret_cast<const char*>(sqlite3_column_text(statement, c));
        out += (c > 0 ? "|" : "") + std::string(text ? text : "NULL");
      }
      out += "\n";
    }
    good = good && (state == SQLITE_DONE || state == SQLITE_ROW);
    if (!good) out = std::string("error: ") + sqlite3_errmsg(db_);
    sqlite3_finalize(statement);
    return good;
  }

 private:
  void run(const std::string& sql) {
    check(sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK, "environment sql: {}",
          sqlite3_errmsg(db_));
  }
  sqlite3* db_ = nullptr;
};

// World: people, the question's query and answer, told: whether a query has brought the answer.
class Sql final : public ToolEnvironment {
 public:
  explicit Sql(const Options& options) : ToolEnvironment({.turns = options.turns}), options_(options) {}

  std::unique_ptr<ChatMessage> demonstrate() override {
    if (world.at("told") || (world.at("failed") && world.at("gives_up")))
      return std::make_unique<ChatMessage>(
          assistant_says(world.at("told") ? std::to_string(world.at("answer").get<int64_t>()) : "0"));
    return std::make_unique<ChatMessage>(assistant_calls("query", {{"sql", world.at("query")}}));
  }

 private:
  Task begin(Draws& draws) override {
    json people = json::array();
    for (int64_t i = 0; i < options_.people; ++i)
      people.push_back(
          {{"name", kNames[i]}, {"city", kCities[draws.below(4)]}, {"age", draws.between(18, 90)}});
    const json& one = people[static_cast<size_t>(draws.below(options_.people))];
    const auto name = one.at("name").get<std::string>(), city = one.at("city").get<std::string>();
    std::string question = "How old is " + name + "?",
                query = "SELECT age FROM people WHERE name = '" + name + "'";
    int64_t answer = one.at("age");
    const int64_t kind = draws.below(3);
    if (kind > 0) {
      question = (kind == 1 ? "How many people live in " : "How old is the oldest in ") + city + "?";
      query = std::string("SELECT ") + (kind == 1 ? "COUNT(*)" : "MAX(age)") + " FROM people WHERE city = '" +
              city + "'";
      answer = 0;
      for (const json& p : people) {
        if (p.at("city") != city) continue;
        answer = kind == 1 ? answer + 1 : std::max(answer, p.at("age").get<int64_t>());
      }
    }
    world = {{"people", people}, {"query", query},  {"answer", answer},
             {"told", false},    {"failed", false}, {"gives_up", draws.chance(options_.give_up)}};
    const json tools =
        json::array({tool_declaration("query", "SQL on people(name, city, age)", {{"sql", "string"}})});
    return {.messages = {user_says(question)}, .tools = tools.dump(), .base_tokens = 0};
  }

  ToolAnswer call(const std::string& tool, const json& arguments, Draws& draws) override {
    if (tool != "query") return {.text = "error: there is no tool " + tool, .wrong = true};
    const auto sql = arguments.at("sql").get<std::string>();
    if (draws.chance(options_.failure)) {
      world["failed"] = true;
      return {.text = "error: busy, try again", .fault = true};
    }
    world["failed"] = false;
    std::string rows;
    if (!Database(world.at("people")).query(sql, rows)) return {.text = rows, .wrong = true};
    const bool valid = rows == std::to_string(world.at("answer").get<int64_t>()) + "\n";
    if (valid) world["told"] = true;
    return {.text = rows.empty() ? "no rows" : rows, .checked = true, .valid = valid};
  }

  Reply respond(const std::string& text) override {
    int64_t value = 0;
    return {.success = read_integer(text, value) && value == world.at("answer") ? 1.0 : 0.0};
  }

  Options options_;
};

}  // namespace

std::unique_ptr<Environment> make_sql(const nlohmann::json& options) {
  check_options("sql", options, {"people", "turns", "failure", "give_up"});
  Options o;
  o.people = std::clamp<int64_t>(options.value("people", o.people), 1, 12);
  o.turns = options.value("turns", o.turns);
  o.failure = options.value("failure", o.failure);
  o.give_up = options.value("give_up", o.give_up);
  return std::make_unique<Sql>(o);
}

#else
std::unique_ptr<Environment> make_sql(const nlohmann::json&) {
  fail("environment sql: this build has no SQLite");
}
#endif

}  // namespace godwit::rl
