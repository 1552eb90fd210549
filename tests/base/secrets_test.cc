#include "forebay/secrets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace forebay {
namespace {

// `words` are separated by single spaces.
std::string masked(std::string words) {
  std::replace(words.begin(), words.end(), ' ', '\0');
  mask_secrets(words.data(), words.size());
  std::replace(words.begin(), words.end(), '\0', ' ');
  return words;
}

TEST(Secrets, ValuesOfSecretNamesAreMasked) {
  EXPECT_EQ(masked("train.py --hf-token abc123 --steps 5"), "train.py --hf-token ****** --steps 5");
  EXPECT_EQ(masked("train.py --password=abc API_KEY=x1 -auth y"),
            "train.py --password=*** API_KEY=** -auth *");
  EXPECT_EQ(masked("a --db-Passwd s"), "a --db-Passwd *");
  EXPECT_EQ(masked("--secret a=b c=d"), "--secret *** c=d");
}

TEST(Secrets, KnownTokensAndPartsOfUrlsAreMasked) {
  EXPECT_EQ(masked("login hf_abcdefghijklmnop"), "login *******************");
  EXPECT_EQ(masked("hf_4567890123456"), "****************") << "sixteen letters are a token";
  EXPECT_EQ(masked("hf_456789012345"), "hf_456789012345") << "fifteen are a name";
  EXPECT_EQ(masked("--url https://me:pass@host/x"), "--url https://*******@host/x");
  EXPECT_EQ(masked("--with=ghp_abcdefghijklmnop"), "--with=********************");
  std::string words("-H\0Authorization: Bearer abc", 29);
  mask_secrets(words.data(), words.size());
  EXPECT_EQ(words, std::string("-H\0Authorization: Bearer ***", 29));
}

TEST(Secrets, EveryNameAndBeginningOfASecretIsKnown) {
  for (const std::string name : {"token", "secret", "password", "passwd", "passphrase", "credential",
                                 "apikey", "api_key", "api-key", "secret_key", "secret-key", "credentials",
                                 "access_key", "access-key", "private_key", "private-key", "auth"}) {
    EXPECT_EQ(masked("--my-" + name + "=x1 " + name + "=y2"), "--my-" + name + "=** " + name + "=**");
  }
  for (const std::string beginning :
       {"hf_", "sk-", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "xoxb-", "xoxp-", "AKIA", "eyJ"}) {
    const std::string token = beginning + std::string(16 - beginning.size(), '7');
    EXPECT_EQ(masked(token), std::string(16, '*')) << beginning;
  }
}

TEST(Secrets, AValueMayBeginWithADash) {
  EXPECT_EQ(masked("--token -abc -x"), "--token **** -x");
}

TEST(Secrets, OtherWordsStay) {
  for (const std::string words :
       {"train.py --tokenizer gpt2 --max-tokens 100 --author me", "--token --verbose", "a=b --secret",
        "https://host/path@2x", "https://host?mail=me@home", "sk-1 hf_x", "", "--tokens=4"}) {
    EXPECT_EQ(masked(words), words);
  }
}

}  // namespace
}  // namespace forebay
