// Chat templates: what Jinja and Hugging Face's tokenizers make of conversations is what
// ChatFormat makes of them, and what it cannot write it refuses.
#include "model/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>

#include "sluice/chat.h"
#include "tests/io/test_files.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using testing::expect_error;

constexpr int kVocabulary = 4200;
const std::string kUser = "{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}";
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

TEST(ChatTemplate, WritesWhatJinjaWrites) {
  const Json all = recorded();
  ASSERT_EQ(all["formats"].size(), 14u);
  Checkpoint checkpoint;
  for (const Json& format : all["formats"]) {
    SCOPED_TRACE(format["name"].get<std::string>());
    checkpoint.write_config(format["config"]);
    const ChatFormat loaded = checkpoint.load();
    EXPECT_EQ(loaded.family(), format["family"].get<std::string>());
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

TEST(ChatTemplate, WhatIsTypedNeverBecomesAControlToken) {
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
TEST(ChatTemplate, ControlTokensNeedNotBeSpecial) {
  Json patch = recorded()["tokenizer_patch"];
  for (Json& token : patch["added_tokens"]) token["special"] = false;
  Checkpoint checkpoint(patch);
  checkpoint.write_template(kUser + kOpens);
  const ChatFormat format = checkpoint.load();
  const auto turns = turns_of({"<|im_end|>"});
  const std::vector<TokenId> ids = format.render("", turns);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), *checkpoint.tokenizer().added_token("<|im_end|>")),
            1);
}

TEST(ChatTemplate, AnswersStayAsTheyWereDrawn) {
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

TEST(ChatTemplate, EndTokens) {
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

TEST(ChatTemplate, TheDateOfLlamaIsTheClocksWhereTheTemplateAsksIt) {
  std::string text = recorded()["formats"][9]["config"]["chat_template"];
  const std::string fixed = "set date_string = \"26 Jul 2024\"";
  text.replace(text.find(fixed), fixed.size(), "set date_string = strftime_now(\"%d %b %Y\")");
  const TemplateTokens tokens{"<|begin_of_text|>", "", "05 Mar 2025"};
  EXPECT_EQ(recognise_template(text, tokens).system_preamble,
            "Cutting Knowledge Date: December 2023\nToday Date: 05 Mar 2025\n\n");
  text.replace(text.find("%d %b %Y"), 8, "%Y-%m-%d");
  expect_error(ErrorCode::unsupported, "writes dates", [&] { recognise_template(text, tokens); });
}

TEST(ChatTemplate, Files) {
  Checkpoint checkpoint;
  expect_error(ErrorCode::unsupported, "has no chat template", [&] { checkpoint.load(); });
  checkpoint.write_config({{"bos_token", "<s>"}});
  expect_error(ErrorCode::unsupported, "has no chat template", [&] { checkpoint.load(); });
  const std::string chatml = kUser + kOpens;
  checkpoint.write_config(
      {{"chat_template",
        {{{"name", "tools"}, {"template", "x"}}, {{"name", "default"}, {"template", chatml}}}}});
  EXPECT_EQ(checkpoint.load().family(), "ChatML");
  // Newer files win.
  checkpoint.write("chat_template.json", Json{{"chat_template", "<start_of_turn>"}}.dump());
  expect_error(ErrorCode::unsupported, "chat_template.json: ", [&] { checkpoint.load(); });
  checkpoint.write("chat_template.jinja", chatml + "\n");
  EXPECT_EQ(checkpoint.load().family(), "ChatML");
}

TEST(ChatTemplate, BrokenFiles) {
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
  broken("bos_token is no token", R"({"bos_token": 1, "chat_template": "x"})");
  broken("eos_token is no token", R"({"eos_token": [], "chat_template": "x"})");
  checkpoint.write("tokenizer_config.json",
                   R"({"chat_template": [{"name": "rag", "template": "x"}]})");
  expect_error(ErrorCode::unsupported, "no entry called 'default'", [&] { checkpoint.load(); });
}

TEST(ChatTemplate, OtherFamiliesAreRefusedByName) {
  Checkpoint checkpoint;
  const auto refused = [&](const std::string& part, const std::string& text) {
    SCOPED_TRACE(text.substr(0, 200));
    checkpoint.write_template(text);
    expect_error(ErrorCode::unsupported, part, [&] { checkpoint.load(); });
    expect_error(ErrorCode::unsupported, "ChatML, Llama 3 and Mistral", [&] { checkpoint.load(); });
  };
  refused("another family: it writes '<start_of_turn>'",
          "{{ bos_token }}{% if x %}{{ raise_exception('[no]') }}{% endif %}"
          "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim }}");
  refused("'<\xEF\xBD\x9CUser\xEF\xBD\x9C>'",
          "{{ '<\xEF\xBD\x9CUser\xEF\xBD\x9C>' + message['content'] }}");
  refused("'USER: '", "{% for m in messages %}{{ 'USER: ' + m.content }}{% endfor %}");
  refused("'<a\\xc2\\x9b>'", "{{ '<a\xC2\x9B>' }}");
  refused("writes nothing", "");
  refused("'<|im_start|>'", "<|im_start|>{{ x }}");
}

// Forms of the families that would be written otherwise than the family is.
TEST(ChatTemplate, UnknownFormsAreRefused) {
  Checkpoint checkpoint;
  const Json all = recorded();
  const auto text_of = [&](const std::string& name) -> std::string {
    for (const Json& format : all["formats"]) {
      if (format["name"] == name) return format["config"]["chat_template"];
    }
    return {};
  };
  const auto config = [](const std::string& text) -> Json {
    return {{"chat_template", text}, {"bos_token", "<s>"}, {"eos_token", "</s>"}};
  };
  const auto refused = [&](const std::string& part, const std::string& text) {
    SCOPED_TRACE(text.substr(0, 300));
    checkpoint.write_config(config(text));
    expect_error(ErrorCode::unsupported, part, [&] { checkpoint.load(); });
  };
  const auto changed = [&](const std::string& name, const std::string& from,
                           const std::string& to) {
    std::string text = text_of(name);
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  checkpoint.write_config(config(kUser + kOpens));
  EXPECT_EQ(checkpoint.load().family(), "ChatML");
  refused("opens an answer with", kUser + "{% if add_generation_prompt %}{{ 'assistant:' }}");
  refused("does not open an answer", kUser);
  refused("'<|vision_start|>'", kUser + "{{ '<|vision_start|>' }}" + kOpens);
  const std::string loop = "{% for message in messages %}" + kUser + "{% endfor %}" + kOpens;
  EXPECT_NO_THROW((checkpoint.write_config(config(loop)), checkpoint.load()));
  for (const char* tag : {"macro m(x)", "filter upper", "raw", "call m()", "set preset"}) {
    refused("not known here: '" + std::string(tag), "{% " + std::string(tag) + " %}" + loop);
  }
  refused("'for message in messages[-2:]'",
          "{% for message in messages[-2:] %}" + kUser + "{% endfor %}" + kOpens);
  refused("writes the date", kUser + "{{ strftime_now('%Y') }}" + kOpens);
  refused("behind a message", kUser + "\n" + kOpens);
  refused("in front of a message", "  " + kUser + kOpens);
  refused("as its family does",
          "{{ '<|im_start|>user\\n' + message.content | upper + '<|im_end|>\\n' }}" + kOpens);
  refused("as its family does",
          "{{ '<|im_start|>user\\n' + (message.content if x else 'y') + "
          "'<|im_end|>\\n' }}" +
              kOpens);
  refused(
      "in front of a message",
      kUser + "{{ '<|im_start|>user\\n' + message.content | trim + '<|im_end|>\\n' }}" + kOpens);
  refused("thinks aloud", kUser + "{{ content.split('</think>')[0] }}" + kOpens);
  refused("as its family does", changed("llama3", "'<|eot_id|>'", "'\\n<|eot_id|>'"));
  refused("writes dates", changed("llama31", "Today Date: ", "Today's Date: "));
  refused("begins a question", changed("mistral7", "'[INST]'", "bos_token + '[INST]'"));
  refused("an answer in two ways",
          changed("mistral7", "{% else %}", "{% elif x %}{{ x + eos_token }}{% else %}"));
  refused("an answer as its", changed("mistral3", "message[\"content\"] + eos_token}}", "'x'}}"));
  refused("a place not known", changed("mistral3", "loop.last and", "loop.index0 == 1 and"));
  refused("'<<SYS>>'", changed("mistral1", "'[INST] '", "'[INST] <<SYS>>'"));
  refused("has a string that does not end", "{{ 'abc }}");
  refused("has a tag that does not end", "{{ 'abc' ");
  refused("has a tag that does not end", "{# abc ");
  refused("brackets that do not match", "{{ (a }}");
  refused("brackets that do not match", "{{ a) }}");
  refused("brackets that do not match", "{{ " + std::string(100'000, '(') + " }}");
  refused("control characters", "a\x01");
  refused("escape \\x", R"({{ '\x01' }})");
  checkpoint.write_config({{"chat_template", text_of("mistral3")}});
  expect_error(ErrorCode::unsupported, "has none", [&] { checkpoint.load(); });
}

TEST(ChatTemplate, TextsOfTheSystem) {
  Checkpoint checkpoint;
  const auto turns = turns_of({"Hello"});
  checkpoint.write_config(recorded()["formats"][10]["config"]);
  expect_error(ErrorCode::unsupported, "no place for a text of the system",
               [&] { checkpoint.load().render("x", turns); });
  expect_error(ErrorCode::prompt, "without a question", [&] { checkpoint.load().render("", {}); });
  // A default that is made of parts, as Mistral's with a date in it.
  Json config = recorded()["formats"][13]["config"];
  config["chat_template"] = "{% set default_system_message = 'Today is ' + today %}" +
                            config["chat_template"].get<std::string>();
  checkpoint.write_config(config);
  const ChatFormat format = checkpoint.load();
  expect_error(ErrorCode::unsupported, "give one with `system`", [&] { format.render("", turns); });
  EXPECT_EQ(checkpoint.tokenizer().decode(format.render("x", turns), true),
            "<s>[SYSTEM_PROMPT]x[/SYSTEM_PROMPT][INST]Hello[/INST]");
  EXPECT_FALSE(format.moves_system());
  checkpoint.write_config(recorded()["formats"][11]["config"]);
  EXPECT_TRUE(checkpoint.load().moves_system());
}

TEST(ChatTemplate, TextsAreTrimmedByWayOfAVariable) {
  Checkpoint checkpoint;
  for (const char* text :
       {"message.content | trim", "message['content'].strip()", "message.content"}) {
    checkpoint.write_template("{% set text = " + std::string(text) +
                              " %}{{ '<|im_start|>user\\n' + text + '<|im_end|>\\n' }}" + kOpens);
    const std::string written =
        checkpoint.tokenizer().decode(checkpoint.load().render("", turns_of({" a "})), true);
    const bool trims = std::string_view(text) != "message.content";
    EXPECT_NE(written.find(trims ? "user\na<" : "user\n a <"), std::string::npos) << written;
  }
}

TEST(ChatTemplate, TextsThatAreNotUtf8) {
  Checkpoint checkpoint;
  checkpoint.write_template(kUser + kOpens);
  const ChatFormat format = checkpoint.load();
  const auto turns = turns_of({"a\xFF"});
  expect_error(ErrorCode::prompt, "offset 1", [&] { format.render("", turns); });
  expect_error(ErrorCode::prompt, "offset 0", [&] { format.render("\x80", turns_of({"a"})); });
}

TEST(ChatTemplate, ControlTokensMustBeThere) {
  Json patch = recorded()["tokenizer_patch"];
  for (Json& token : patch["added_tokens"]) {
    if (token["content"] == "<|im_end|>") token["content"] = "<|end|>";
    if (token["content"] == "<|eot_id|>") token["rstrip"] = true;
  }
  Checkpoint checkpoint(patch);
  checkpoint.write_template(kUser + kOpens);
  expect_error(ErrorCode::tokenizer, "needs the token '<|im_end|>'", [&] { checkpoint.load(); });
  checkpoint.write_config(recorded()["formats"][8]["config"]);
  expect_error(ErrorCode::unsupported, "takes white space", [&] { checkpoint.load(); });
}

// What a file can hold takes no time worth mentioning, whatever it is.
TEST(ChatTemplate, LongTemplatesTakeLittleTime) {
  Checkpoint checkpoint;
  const std::string known = kUser + kOpens;
  const auto start = std::chrono::steady_clock::now();
  for (const std::string piece : {"<", "<|", "[", "{{", "{{(", "{{ a }}", "<|im_start|>system\n",
                                  "<|im_end|><|im_start|>", "{% set a = 'b' %}", "{{ '\\n' +"}) {
    std::string text;
    while (text.size() < 130'000) text += piece;
    checkpoint.write("chat_template.jinja", text);
    EXPECT_THROW(checkpoint.load(), Error) << piece;
    text.insert(0, known);
    checkpoint.write("chat_template.jinja", text);
    EXPECT_THROW(checkpoint.load(), Error) << piece;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  checkpoint.write("chat_template.jinja", std::string(140'000, 'x'));
  expect_error(ErrorCode::corrupt, "chat_template.jinja", [&] { checkpoint.load(); });
}

// Every cut of a template, and random changes of single bytes: a format or an error.
TEST(ChatTemplate, DamageIsNeverMoreThanAnError) {
  const Json all = recorded();
  std::mt19937_64 random(17);  // the seed
  int formats = 0;
  for (const Json& format : all["formats"]) {
    const std::string text = format["config"]["chat_template"];
    for (int i = 0; i < 300; ++i) {
      std::string damaged = text;
      for (std::size_t n = 1 + random() % 3; n > 0; --n) {
        damaged[random() % damaged.size()] = static_cast<char>(random() % 256);
      }
      if (i % 4 == 0) damaged.resize(random() % damaged.size());
      try {
        recognise_template(damaged, {"<s>", "</s>", "05 Mar 2025"});
        ++formats;
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::unsupported) << error.what();
        ASSERT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
      }
    }
  }
  EXPECT_GT(formats, 0);
}

}  // namespace
}  // namespace sluice
