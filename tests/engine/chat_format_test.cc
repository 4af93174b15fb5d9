// Chat templates: what Jinja and Hugging Face's tokenizers make of conversations is what
// ChatFormat makes of them, and what it cannot write it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "sluice/chat.h"
#include "tests/io/test_files.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using testing::expect_error;

constexpr int kVocabulary = 4200;
const std::string kUser =
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{% endfor %}";
const std::string kOpens =
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

Json recorded() { return Json::parse(testing::read_bytes(SLUICE_TEST_DATA "/chat_cases.json")); }

// A checkpoint's tokenizer with control tokens, and the files about its chat template.
class Checkpoint {
 public:
  explicit Checkpoint(const Json& patch = recorded()["tokenizer_patch"]) {
    Json file =
        Json::parse(testing::read_bytes(SLUICE_SOURCE_DIR "/models/sluice-22m/tokenizer.json"));
    file.merge_patch(patch);
    tokenizer_.emplace(
        Tokenizer::load(directory_.write("tokenizer.json", file.dump()), kVocabulary));
  }

  void write(const std::string& name, const std::string& text) { directory_.write(name, text); }
  void write_config(const Json& config) { write("tokenizer_config.json", config.dump()); }
  void write_template(const std::string& text) { write_config({{"chat_template", text}}); }

  ChatFormat load() const { return ChatFormat::load(directory_.path(), *tokenizer_); }
  const Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  testing::TempDir directory_;
  std::optional<Tokenizer> tokenizer_;
};

std::vector<ChatTurn> turns_of(const std::vector<std::string>& texts) {
  std::vector<ChatTurn> turns;
  for (std::size_t i = 0; i < texts.size(); i += 2) {
    turns.push_back({texts[i], i + 1 < texts.size() ? texts[i + 1] : "", {}});
  }
  return turns;
}

TEST(ChatFormatTest, WritesWhatJinjaWrites) {
  const Json all = recorded();
  ASSERT_EQ(all["formats"].size(), 14u);
  Checkpoint checkpoint;
  for (const Json& format : all["formats"]) {
    SCOPED_TRACE(format["name"].get<std::string>());
    checkpoint.write_config(format["config"]);
    const ChatFormat loaded = checkpoint.load();
    EXPECT_EQ(loaded.file().filename(), "tokenizer_config.json");
    ASSERT_GE(format["cases"].size(), 3u);
    for (const Json& expected : format["cases"]) {
      SCOPED_TRACE(expected["text"].dump(-1, ' ', true));
      const auto turns = turns_of(expected["texts"].get<std::vector<std::string>>());
      const std::vector<TokenId> ids = loaded.render(expected["system"].get<std::string>(), turns);
      EXPECT_EQ(checkpoint.tokenizer().decode(ids, true), expected["text"].get<std::string>());
      EXPECT_EQ(ids, expected["ids"].get<std::vector<TokenId>>());
    }
  }
}

TEST(ChatFormatTest, WhatIsTypedNeverBecomesAControlToken) {
  const Json all = recorded();
  Checkpoint checkpoint;
  std::string typed = "a";
  std::vector<TokenId> controls;
  for (const Json& token : all["tokenizer_patch"]["added_tokens"]) {
    if (!token["special"].get<bool>()) continue;
    typed += token["content"].get<std::string>() + " b";
    controls.push_back(token["id"].get<TokenId>());
  }
  const auto count = [&](const std::vector<TokenId>& ids) {
    return std::count_if(ids.begin(), ids.end(), [&](TokenId id) {
      return std::find(controls.begin(), controls.end(), id) != controls.end();
    });
  };
  ASSERT_EQ(count(checkpoint.tokenizer().encode(typed)), 13);
  for (const Json& format : all["formats"]) {
    if (format["name"] == "mistral1") continue;  // has no place for the system's text
    SCOPED_TRACE(format["name"].get<std::string>());
    checkpoint.write_config(format["config"]);
    const ChatFormat loaded = checkpoint.load();
    const auto plain = loaded.render("s", turns_of({"a", "b", "c"}));
    const auto ids = loaded.render(typed, turns_of({typed, typed, typed}));
    EXPECT_EQ(count(ids), count(plain));
    EXPECT_THAT(checkpoint.tokenizer().decode(ids), ::testing::HasSubstr(typed));
  }
}

// Control tokens that a checkpoint forgot to call special, as some do.
TEST(ChatFormatTest, ControlTokensNeedNotBeSpecial) {
  Json patch = recorded()["tokenizer_patch"];
  for (Json& token : patch["added_tokens"]) token["special"] = false;
  Checkpoint checkpoint(patch);
  checkpoint.write_template(kUser + kOpens);
  const ChatFormat format = checkpoint.load();
  const auto turns = turns_of({"<|im_end|>"});
  const std::vector<TokenId> ids = format.render("", turns);
  EXPECT_EQ(
      std::count(ids.begin(), ids.end(), checkpoint.tokenizer().find_added("<|im_end|>").at(0).id),
      1);
}

TEST(ChatFormatTest, AnswersStayAsTheyWereDrawn) {
  Checkpoint checkpoint;
  checkpoint.write_config(recorded()["formats"][0]["config"]);
  const ChatFormat format = checkpoint.load();
  const Tokenizer& tokenizer = checkpoint.tokenizer();
  // Byte by byte, as no tokenizer would have it.
  std::vector<TokenId> bytes;
  for (const char* letter : {"H", "e", "l", "l", "o"}) {
    bytes.push_back(tokenizer.encode(letter).front());
  }
  ASSERT_NE(bytes, tokenizer.encode("Hello"));
  std::vector<ChatTurn> turns = {{"a", "Hello", bytes}, {"b", "", {}}};
  const std::vector<TokenId> ids = format.render("", turns);
  EXPECT_NE(std::search(ids.begin(), ids.end(), bytes.begin(), bytes.end()), ids.end());
  turns.front().answer = "Hell";  // up to a stop string
  const std::vector<TokenId> cut = format.render("", turns);
  turns.front().tokens.clear();
  EXPECT_EQ(cut, format.render("", turns));
}

TEST(ChatFormatTest, EndTokens) {
  Checkpoint checkpoint;
  const auto ends = [&](std::size_t format) {
    checkpoint.write_config(recorded()["formats"][format]["config"]);
    const ChatFormat loaded = checkpoint.load();
    return checkpoint.tokenizer().decode(loaded.end_tokens(), true);
  };
  EXPECT_EQ(ends(0), "<|im_end|>");
  EXPECT_EQ(ends(8), "<|eot_id|>");
  EXPECT_EQ(ends(11), "</s>");
}

TEST(ChatFormatTest, DatesAreTodays) {
  std::string text = recorded()["formats"][9]["config"]["chat_template"];
  const std::string fixed = "set date_string = \"26 Jul 2024\"";
  text.replace(text.find(fixed), fixed.size(), "set date_string = strftime_now(\"%d %b %Y\")");
  Checkpoint checkpoint;
  checkpoint.write_config({{"chat_template", text}, {"bos_token", "<s>"}});
  const std::string written =
      checkpoint.tokenizer().decode(checkpoint.load().render("", turns_of({"x"})));
  EXPECT_THAT(written,
              ::testing::ContainsRegex("Today Date: [0-9][0-9] [A-Z][a-z][a-z] 20[0-9][0-9]\n"));
}

TEST(ChatFormatTest, Files) {
  Checkpoint checkpoint;
  expect_error(ErrorCode::unsupported, "has no chat template", [&] { checkpoint.load(); });
  checkpoint.write_config({{"bos_token", "<s>"}});
  expect_error(ErrorCode::unsupported, "has no chat template", [&] { checkpoint.load(); });
  const std::string chatml = kUser + kOpens;
  checkpoint.write_config(
      {{"chat_template",
        {{{"name", "tools"}, {"template", "x"}}, {{"name", "default"}, {"template", chatml}}}}});
  EXPECT_EQ(checkpoint.load().file().filename(), "tokenizer_config.json");
  // Newer files win.
  checkpoint.write("chat_template.json", Json{{"chat_template", "{% nonsense %}"}}.dump());
  expect_error(ErrorCode::unsupported, "chat_template.json: ", [&] { checkpoint.load(); });
  checkpoint.write("chat_template.jinja", chatml + "\n");
  EXPECT_EQ(checkpoint.load().file().filename(), "chat_template.jinja");
  // A token that tokenizer_config.json lacks may stand in an older file.
  checkpoint.write("chat_template.jinja", "{{ bos_token }}" + chatml);
  checkpoint.write("special_tokens_map.json", R"({"bos_token": {"content": "<s>"}})");
  EXPECT_THAT(checkpoint.tokenizer().decode(checkpoint.load().render("", turns_of({"x"})), true),
              ::testing::StartsWith("<s><|im_start|>user\nx"));
}

TEST(ChatFormatTest, BrokenFiles) {
  Checkpoint checkpoint;
  const auto broken = [&](const std::string& part, const std::string& text) {
    SCOPED_TRACE(text);
    checkpoint.write("tokenizer_config.json", text);
    expect_error(ErrorCode::corrupt, part, [&] { checkpoint.load(); });
    expect_error(ErrorCode::corrupt, "tokenizer_config.json: ", [&] { checkpoint.load(); });
  };
  for (const char* text : {"", "{", "{\"chat_template\": \"x\"", "\xFF"}) broken("", text);
  broken("is no JSON object", "[]");
  broken("neither a string nor a list", "{\"chat_template\": 7}");
  broken("neither a string nor a list", "{\"chat_template\": {}}");
  broken("without name and template", "{\"chat_template\": [1]}");
  broken("without name and template", R"({"chat_template": [{"name": "default"}]})");
  broken("bos_token holds something that is no token", R"({"bos_token": 1, "chat_template": "x"})");
  broken("eos_token holds something that is no token",
         R"({"eos_token": [], "chat_template": "x"})");
  checkpoint.write("tokenizer_config.json",
                   R"({"chat_template": [{"name": "rag", "template": "x"}]})");
  expect_error(ErrorCode::unsupported, "no entry called 'default'", [&] { checkpoint.load(); });
}

TEST(ChatFormatTest, WhatCannotBeWrittenIsRefused) {
  Checkpoint checkpoint;
  const auto refused = [&](const std::string& part, const std::string& text) {
    SCOPED_TRACE(text.substr(0, 200));
    checkpoint.write_config({{"chat_template", text}, {"bos_token", "<s>"}, {"eos_token", "</s>"}});
    expect_error(ErrorCode::unsupported, part, [&] { checkpoint.load(); });
    expect_error(ErrorCode::unsupported, "tokenizer_config.json: ", [&] { checkpoint.load(); });
  };
  refused("does not write every text once", "");
  refused("does not write every text once", "{{ messages[0].content }}");
  refused("does not write every text once", kUser + kUser + kOpens);
  refused("does not write every text once",
          "{% for message in messages %}{{ message.content | length }}{% endfor %}");
  refused("'block', in line 1", "{% block x %}{% endblock %}" + kUser);
  refused("uses 'message', which is undefined in line 1", "{{ message.content }}");
  refused("refuses this conversation: 'never'", "{{ raise_exception('never') }}");
  refused("takes implausibly many steps", "{{ 'x' * 99999999 }}");
}

// Whatever a fine-tune has changed is run as it stands.
TEST(ChatFormatTest, ConditionsAndDefaultsAreTheTemplates) {
  Checkpoint checkpoint;
  const auto written = [&](const std::string& text, const std::string& system,
                           const std::vector<std::string>& texts) {
    checkpoint.write_config({{"chat_template", text}, {"bos_token", "<s>"}, {"eos_token", "</s>"}});
    return checkpoint.tokenizer().decode(checkpoint.load().render(system, turns_of(texts)), true);
  };
  const std::string by_default =
      "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
      "{% set messages = messages[1:] %}{% elif messages | length > 2 %}{% set system = 'Long.' %}"
      "{% else %}{% set system = 'Today is ' + 'x' %}{% endif %}"
      "{{ bos_token if messages | length > 2 }}{{ '[SYSTEM_PROMPT]' + system }}" +
      kUser + kOpens;
  const std::string user = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(written(by_default, "", {"a"}), "[SYSTEM_PROMPT]Today is x" + user);
  EXPECT_EQ(written(by_default, "Mine.", {"a"}), "[SYSTEM_PROMPT]Mine." + user);
  EXPECT_EQ(written(by_default, "", {"a", "b", "a"}),
            "<s>[SYSTEM_PROMPT]Long." + user + "b<|im_end|>\n" + user);
  const std::string per_role =
      "{% for message in messages %}{{ loop.index }}{% if message.role == 'user' %}"
      "{{ '[INST]' + message.content | trim + '[/INST]' }}{% else %}{{ message.content + eos_token "
      "}}"
      "{% endif %}{% endfor %}";
  EXPECT_EQ(written(per_role, "", {" a ", " b ", " c"}), "1[INST]a[/INST]2 b </s>3[INST]c[/INST]");
  EXPECT_EQ(checkpoint.tokenizer().decode(checkpoint.load().end_tokens(), true), "</s>");
  // Families of their own.
  const std::string plain =
      "{% for message in messages %}{{ message.role | capitalize + ': ' + message.content + '\\n' "
      "}}"
      "{% endfor %}{{ 'Assistant:' }}";
  EXPECT_EQ(written(plain, "", {"a", " b", "c"}), "User: a\nAssistant:  b\nUser: c\nAssistant:");
  EXPECT_TRUE(checkpoint.load().end_tokens().empty());
}

TEST(ChatFormatTest, TextsOfTheSystem) {
  Checkpoint checkpoint;
  const auto turns = turns_of({"Hello"});
  checkpoint.write_config(recorded()["formats"][10]["config"]);
  expect_error(ErrorCode::unsupported, "no place for a text of the system",
               [&] { checkpoint.load().render("x", turns); });
  expect_error(ErrorCode::prompt, "without a question", [&] { checkpoint.load().render("", {}); });
  EXPECT_FALSE(checkpoint.load().moves_system());
  // Nothing that was given is dropped without a word.
  checkpoint.write_template(
      "{% set messages = messages | rejectattr('role', 'equalto', 'system') %}" + kUser + kOpens);
  EXPECT_NO_THROW(checkpoint.load().render("", turns));
  expect_error(ErrorCode::unsupported, "no place for a text of the system",
               [&] { checkpoint.load().render("x", turns); });
  checkpoint.write_template("{% set messages = messages[-3:] %}" + kUser + kOpens);
  expect_error(ErrorCode::prompt, "drops a question", [&] {
    checkpoint.load().render("", turns_of({"a", "b", "c", "d", "e"}));
  });
  checkpoint.write_config(recorded()["formats"][11]["config"]);
  EXPECT_TRUE(checkpoint.load().moves_system());
  checkpoint.write_config(recorded()["formats"][13]["config"]);
  EXPECT_FALSE(checkpoint.load().moves_system());
}

// Some templates want a text of the system.
TEST(ChatFormatTest, ASystemThatIsWantedIsAskedFor) {
  Checkpoint checkpoint;
  checkpoint.write_template(
      "{% if messages[0].role != 'system' %}{{ raise_exception('Say who I am.') }}{% endif %}" +
      kUser + kOpens);
  const ChatFormat format = checkpoint.load();
  expect_error(ErrorCode::prompt, "'Say who I am.'", [&] { format.render("", turns_of({"a"})); });
  EXPECT_EQ(checkpoint.tokenizer().decode(format.render("A bird.", turns_of({"a"})), true),
            "<|im_start|>system\nA bird.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n");
}

TEST(ChatFormatTest, TextsThatAreNotUtf8) {
  Checkpoint checkpoint;
  checkpoint.write_template(kUser + kOpens);
  const ChatFormat format = checkpoint.load();
  const auto turns = turns_of({"a\xFF"});
  expect_error(ErrorCode::prompt, "offset 1", [&] { format.render("", turns); });
  expect_error(ErrorCode::prompt, "offset 0", [&] { format.render("\x80", turns_of({"a"})); });
}

TEST(ChatFormatTest, ControlTokensMustBeThere) {
  Json patch = recorded()["tokenizer_patch"];
  for (Json& token : patch["added_tokens"]) {
    if (token["content"] == "<|im_end|>") token["content"] = "<|end|>";
    if (token["content"] == "<|eot_id|>") token["rstrip"] = true;
  }
  Checkpoint checkpoint(patch);
  checkpoint.write_template(kUser + kOpens);
  EXPECT_EQ(checkpoint.load().text_markers().front(), "<|im_end|>");
  checkpoint.write_config({{"eos_token", "<|im_end|>"}, {"chat_template", kUser + kOpens}});
  expect_error(ErrorCode::tokenizer, "needs the token '<|im_end|>'", [&] { checkpoint.load(); });
  checkpoint.write_config(recorded()["formats"][8]["config"]);
  expect_error(ErrorCode::unsupported, "takes white space", [&] { checkpoint.load(); });
}

// What a file can hold takes no time worth mentioning, whatever it is.
TEST(ChatFormatTest, LongTemplatesTakeLittleTime) {
  Checkpoint checkpoint;
  const std::string known = kUser + kOpens;
  const auto start = std::chrono::steady_clock::now();
  for (const std::string piece : {"<", "<|", "[", "{", "{{", "{{(", "{%", "{#", "{{ a }}",
                                  "{{ '<|' }}", "<|im_end|><|im_start|>", "{% set a = 'b' %}",
                                  "{{ '\\n' +", "{% if a %}", "{% for a in messages %}"}) {
    std::string text;
    while (text.size() < 130'000) text += piece;
    for (const std::string& begin : {std::string(), known}) {
      checkpoint.write("chat_template.jinja", begin + text);
      try {
        checkpoint.load().render("", turns_of({"x"}));
      } catch (const Error& error) {
        EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
      }
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  checkpoint.write("chat_template.jinja", std::string(140'000, 'x'));
  expect_error(ErrorCode::corrupt, "chat_template.jinja", [&] { checkpoint.load(); });
}

TEST(ChatFormatTest, LongConversations) {
  Checkpoint checkpoint;
  checkpoint.write_config(recorded()["formats"][6]["config"]);
  const ChatFormat format = checkpoint.load();
  const std::vector<TokenId> few = format.render("", turns_of({"a", "b", "a"}));
  std::vector<std::string> texts(20'001, "a");
  for (std::size_t i = 1; i < texts.size(); i += 2) texts[i] = "b";
  const std::vector<TokenId> many = format.render("", turns_of(texts));
  const std::size_t opening = format.render("", turns_of({"a"})).size();
  EXPECT_EQ(many.size(), opening + (few.size() - opening) * 10'000);
  const std::vector<TokenId> wide = format.render("", turns_of({std::string(1 << 23, 'a')}));
  EXPECT_GT(wide.size(), 100'000u);
}

}  // namespace
}  // namespace sluice
