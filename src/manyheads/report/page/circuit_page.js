// A page with nothing but a circuit.

import { startThemes } from "./theme.js";

startThemes(() => {});
