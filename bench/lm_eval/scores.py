"""What the harness's tasks make of answers: scores as RULER and LongBench have them."""

import re
import string
from collections import Counter


def string_match_all(doc, results):
    answer = results[0].lower()
    return {"score": sum(right.lower() in answer for right in doc["right"]) / len(doc["right"])}


def words(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def best_f1(doc, results):
    def f1(right):
        said, other = words(results[0]), words(right)
        return 2 * sum((Counter(said) & Counter(other)).values()) / (len(said) + len(other))

    return {"score": max(map(f1, doc["right"]))}


def log_likelihood(doc, results):
    return {"log_likelihood": results[0][0]}
