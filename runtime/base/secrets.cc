#include "forebay/secrets.h"

#include <algorithm>
#include <string_view>

namespace forebay {
namespace {

// Endings of names, so that --tokenizer and --max-tokens are none.
constexpr std::string_view kSecretNames[] = {
    "token",      "secret",     "password",    "passwd",      "passphrase", "credential",
    "apikey",     "api_key",    "api-key",     "secret_key",  "secret-key", "credentials",
    "access_key", "access-key", "private_key", "private-key", "auth"};
constexpr std::string_view kTokenBeginnings[] = {"hf_",    "sk-",   "ghp_",  "gho_", "ghs_", "github_pat_",
                                                 "glpat-", "xoxb-", "xoxp-", "AKIA", "eyJ"};
// A shorter word is a name or a file.
constexpr std::size_t kTokenLengthMin = 16;

char small(char letter) {
  return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
}

bool is_secret_name(std::string_view name) {
  return std::any_of(std::begin(kSecretNames), std::end(kSecretNames), [&](std::string_view ending) {
    return name.size() >= ending.size() && std::equal(ending.rbegin(), ending.rend(), name.rbegin(),
                                                      [](char a, char b) { return a == small(b); });
  });
}

bool is_token(std::string_view word) {
  return word.size() >= kTokenLengthMin &&
         std::any_of(std::begin(kTokenBeginnings), std::end(kTokenBeginnings),
                     [&](std::string_view beginning) { return word.starts_with(beginning); });
}

void mask_word(char* word, std::size_t length) {
  const std::string_view text(word, length);
  const std::size_t equals = text.find('=');
  std::size_t value = equals == std::string_view::npos ? 0 : equals + 1;
  bool is_secret = is_token(text.substr(value)) || (value > 0 && is_secret_name(text.substr(0, equals)));
  std::size_t end = length;
  if (const std::size_t bearer = text.find("Bearer "); !is_secret && bearer != std::string_view::npos) {
    value = bearer + 7;
    is_secret = true;
  }
  const std::size_t host = text.find("://");
  const std::size_t at = host == std::string_view::npos ? host : text.find_first_of("@/?", host + 3);
  if (!is_secret && at != std::string_view::npos && text[at] == '@') {
    value = host + 3;
    end = at;
    is_secret = true;
  }
  if (is_secret) std::fill(word + value, word + end, '*');
}

}  // namespace

void mask_secrets(char* words, std::size_t bytes) noexcept {
  bool is_value = false;
  for (std::size_t begin = 0; begin < bytes;) {
    const std::size_t end = static_cast<std::size_t>(std::find(words + begin, words + bytes, '\0') - words);
    const std::string_view word(words + begin, end - begin);
    const bool is_option = word.starts_with('-');
    const bool names_secret = is_option && word.find('=') == std::string_view::npos && is_secret_name(word);
    if (is_value && !word.starts_with("--")) {
      std::fill(words + begin, words + end, '*');
    } else {
      mask_word(words + begin, end - begin);
    }
    is_value = names_secret;
    begin = end + 1;
  }
}

}  // namespace forebay
