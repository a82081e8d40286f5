// What the report and the atlas say both, in Russian.

import { addSentences } from "./language.js";

addSentences("ru", {
  "Passage {0}, largest weight {1}": "Отрывок {0}, наибольший вес {1}",
  "Passage {0}. Arrow keys choose the query.": "Отрывок {0}. Стрелками выбирается запрос.",
  "Show the whole passage": "Показать весь отрывок",
  "What it reads": "Что она читает",
  "at {0}": "на позиции {0}",
  "itself": "сам токен",
  "{0} before": "{0} назад",
  "{0} after": "{0} вперёд",
  "{0} at {1} looks at ": "{0} на позиции {1} смотрит на ",
  "many tokens, each a little": "много токенов, на каждый понемногу",
  "mixed": "смешанная",
  "dead": "мёртвая",
  "harmful": "вредная",
  "duplicate": "дубликат",
  "Switch between light and dark": "Переключить светлую и тёмную тему",
  "New to attention heads?": "Впервые видите головы внимания?",
  "All heads": "Все головы",
  "All heads: layers down, heads across": "Все головы: слои по вертикали, головы по горизонтали",
  "Previous head": "Предыдущая голова",
  "Next head": "Следующая голова",
  "Made on {0}.": "Дата: {0}.",
  "95% interval {0} to {1}": "95%-й интервал от {0} до {1}",
  "near {0}": "≈ {0}",
});
