// Circuits in Russian: from the English sentence to the Russian one.

import { addSentences } from "./language.js";

addSentences("ru", {
  "A circuit": "Схема",
  "Number of edges": "Число рёбер",
  "Edges": "Рёбра",
  "Read by": "Кем читается",
  "helps": "помогает",
  "works against": "мешает",
  "A circuit: layers upward, lines from what writes to what reads; arrow keys move between nodes": "Схема: слои снизу вверх, линии от пишущего к читающему; между узлами можно ходить стрелками",
  "{0}: reads through {1} edges, writes into {2}": "{0}: читает через рёбра: {1}, пишет в {2}",
  "The strongest edges": "Самые сильные рёбра",
  "{0} reads": "{0} читает",
  "{0} writes into": "{0} пишет в",
  "No edge is left: choose what they are read by.": "Рёбер не осталось: выберите, кем они читаются.",
  "Point at a node, or move to one with the keyboard, to see its edges; a click keeps it.": "Наведите курсор на узел или перейдите к нему с клавиатуры, чтобы увидеть его рёбра; щелчок закрепит его.",
  "{0} edges: {1}": "рёбер {0}: {1}",
  "Faithfulness by the number of edges kept": "Точность воспроизведения по числу оставленных рёбер",
});
