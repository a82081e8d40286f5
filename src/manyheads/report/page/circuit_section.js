// The section of a circuit, on a page of its own or in a report.

import { showCircuit } from "./circuit.js";

const circuitData = JSON.parse(document.getElementById("circuit-data").textContent);
showCircuit(document.getElementById("circuit"), circuitData.view, circuitData.curve);
