import { addSentences } from "./language.js"; addSentences("ru", {});
