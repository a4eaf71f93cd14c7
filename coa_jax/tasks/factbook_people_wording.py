"""Holds varied templates of questions about the Factbook, as `factbook_people_grammar` uses them.

The last quarter of each tuple, at least one template, is held out: no training question uses it.
The slots ``{entity}``, ``{a}``, ``{b}`` and ``{c}`` stand for an entity, ``{value}`` for the value
that identifies an entity.
"""

from __future__ import annotations

from collections.abc import Mapping

Templates = tuple[str, ...]

ASK: Mapping[str, Templates] = {
    "capital": (
        "What's the capital of {entity}?",
        "From which city is {entity} governed?",
        "Where does the government of {entity} sit?",
        "I need the name of the capital of {entity}.",
        "Which city do diplomats sent to {entity} live in, that is, what is its capital?",
        "What is the seat of government of {entity} called?",
        "Quiz night: the capital of {entity} is what?",
    ),
    "area": (
        "How large is {entity}?",
        "How many square kilometers does {entity} cover?",
        "What's the size of {entity} in sq km?",
        "Total area of {entity}, please.",
        "How big a territory does {entity} have?",
        "Give me the extent of {entity} in square kilometers.",
    ),
    "population": (
        "How many inhabitants does {entity} have?",
        "What's the head count of {entity}?",
        "How many residents are there in {entity}?",
        "Number of people in {entity}?",
        "If I counted everybody in {entity}, how many would there be?",
        "What is the size of the population living in {entity}?",
    ),
    "currency": (
        "Which currency do shops in {entity} take?",
        "What do people pay with in {entity}?",
        "What is legal tender in {entity}?",
        "I'm travelling to {entity}. What is its currency?",
        "Which money should I change before a visit to {entity}?",
        "Prices in {entity} are given in which currency?",
    ),
    "internet_code": (
        "What does a web address from {entity} end with?",
        "Which top-level domain belongs to {entity}?",
        "What's the internet domain of {entity}?",
        "Which country code do sites of {entity} use?",
        "If I register a site in {entity}, what is its ending?",
    ),
    "demonym": (
        "What are the people of {entity} called?",
        "How do you call somebody from {entity}?",
        "What's the word for an inhabitant of {entity}?",
        "By what name do people from {entity} go?",
        "Someone born in {entity} is a what?",
    ),
    "highest_point": (
        "What's the highest spot in {entity}?",
        "Which point of {entity} lies highest above the sea?",
        "What is the name of the tallest peak of {entity}?",
        "Climbers want the summit of {entity}: what is it called?",
        "Which peak towers over all others in {entity}?",
    ),
    "highest_elevation": (
        "How high does {entity} rise at its highest point?",
        "How many meters above the sea is the highest point of {entity}?",
        "What's the elevation of the highest place in {entity}?",
        "At the very top of {entity}, how high am I?",
        "How far above sea level does the land of {entity} reach?",
    ),
    "mean_elevation": (
        "How high is {entity} on average?",
        "What's the average elevation of {entity}?",
        "On average, how many meters above the sea does {entity} lie?",
        "Average height of the land in {entity}?",
        "How high above the sea is the typical place in {entity}?",
    ),
    "lowest_point": (
        "What's the lowest spot in {entity}?",
        "Where does the land of {entity} lie lowest?",
        "Which place in {entity} has the least elevation?",
        "At which point is {entity} lowest?",
    ),
    "coastline": (
        "How many kilometers of coast does {entity} have?",
        "What's the length of the coast of {entity}?",
        "If I walked along the whole coast of {entity}, how many km would it be?",
        "How long a coast does {entity} have?",
        "Length of the shoreline of {entity}?",
    ),
    "government": (
        "How is {entity} governed?",
        "What form of government does {entity} have?",
        "What kind of state is {entity}?",
        "Is {entity} a republic, a monarchy or something else?",
        "Under which form of rule do people live in {entity}?",
    ),
    "independence": (
        "When did {entity} become a state of its own?",
        "On which date did {entity} gain independence?",
        "Since when has {entity} been independent?",
        "When was {entity} founded as an independent state?",
        "From what day on did {entity} rule itself?",
    ),
    "anthem": (
        "What's the national anthem of {entity} called?",
        "Which song is the anthem of {entity}?",
        "What do they sing at state ceremonies of {entity}?",
        "Name of the hymn of {entity}?",
        "Which anthem is played when athletes from {entity} win?",
    ),
    "largest_city": (
        "What's the biggest city in {entity}?",
        "Which city in {entity} has the most inhabitants?",
        "What is the most populous town of {entity}?",
        "In which city do more people of {entity} live than in any other?",
        "Main metropolis of {entity}?",
    ),
    "aircraft_prefix": (
        "With what do the registrations of planes from {entity} begin?",
        "What prefix do aircraft of {entity} carry?",
        "Which letters or digits mark a plane of {entity}?",
        "A plane registered in {entity}: which prefix is on its tail?",
    ),
    "airports": (
        "How many airports are there in {entity}?",
        "How many places to land a plane does {entity} have?",
        "What number of airports does {entity} have?",
        "How many airfields could a pilot choose from in {entity}?",
    ),
    "railways": (
        "How long are the railways of {entity}?",
        "How many kilometers of rail does {entity} have?",
        "What's the length of the rail network in {entity}?",
        "How much track did they lay in {entity}, in km?",
        "Total km of railway lines in {entity}?",
    ),
    "heritage_sites": (
        "How many World Heritage Sites does {entity} have?",
        "How many places in {entity} are on the World Heritage list?",
        "What's the number of World Heritage Sites of {entity}?",
        "How often does {entity} appear on the list of World Heritage Sites?",
        "UNESCO lists how many sites in {entity}?",
    ),
    "median_age": (
        "How old is the middle person in {entity}?",
        "What's the median age in {entity}?",
        "At which age are half of the people in {entity} younger?",
        "How young are people in {entity}, by median age?",
        "Median age of the people of {entity}?",
    ),
    "life_expectancy": (
        "How long do people in {entity} live?",
        "What age do people reach on average in {entity}?",
        "How many years can someone in {entity} expect to live?",
        "What's the life expectancy in {entity}?",
        "Average length of a life in {entity}?",
    ),
    "borders": (
        "Which countries are next to {entity}?",
        "Which countries does {entity} touch by land?",
        "Who are the neighbours of {entity}?",
        "Name every state with a land border with {entity}.",
        "What countries surround {entity}?",
    ),
}
"""Relation -> templates of questions that ask for the value of an entity."""

ASK_INVERSE: Mapping[str, Templates] = {
    "capital": (
        "{value} is the capital of what country?",
        "Which country is governed from {value}?",
        "The government sits in {value}. Which country is this?",
        "Where am I if the capital is {value}?",
    ),
    "internet_code": (
        "Which country has web addresses that end in {value}?",
        "Whose internet domain is {value}?",
        "A site ends in {value}. Which country is it from?",
        "I got mail from an address in {value}: what country is that?",
    ),
    "demonym": (
        "People called {value}: where are they from?",
        "Which country's people are known as {value}?",
        "Somebody who is {value} comes from which country?",
        "The word {value} means a citizen of which country?",
    ),
    "highest_point": (
        "{value} is the top of which country?",
        "In which country is {value} the highest spot?",
        "Which country has {value} as its tallest peak?",
        "I stand on {value}, the roof of a country. Which one?",
    ),
    "anthem": (
        'Which country sings "{value}" as its anthem?',
        '"{value}" is the anthem of which state?',
        'Which nation\'s hymn has the title "{value}"?',
        'They play "{value}". Which country\'s anthem is this?',
    ),
    "aircraft_prefix": (
        "Which country's planes have {value} as prefix?",
        "A plane has the prefix {value}. Where is it registered?",
        "Aircraft marked {value} belong to which country?",
    ),
}
"""Relation -> templates of questions that ask which country has a value."""

INVERSE: Mapping[str, Templates] = {
    "capital": (
        "the country governed from {value}",
        "the country with the capital {value}",
        "the state whose government sits in {value}",
        "the country that {value} is the capital of",
    ),
    "internet_code": (
        "the country with the web ending {value}",
        "the country whose sites end in {value}",
        "the owner of the internet domain {value}",
    ),
    "demonym": (
        "the country of the {value} people",
        "the country whose people are called {value}",
        "the homeland of those known as {value}",
    ),
    "highest_point": (
        "the country that has its top at {value}",
        "the country whose tallest peak is {value}",
        "the country crowned by {value}",
    ),
    "anthem": (
        'the country that sings "{value}"',
        'the country with the anthem "{value}"',
        'the nation whose hymn is "{value}"',
    ),
    "aircraft_prefix": (
        "the country whose planes carry {value}",
        "the country with the aircraft prefix {value}",
        "the country that registers planes under {value}",
    ),
}
"""Relation -> templates of noun phrases for the country that has a value."""

NEIGHBOUR: Templates = (
    "the country that shares most border with {entity}",
    "the neighbour with the longest frontier to {entity}",
    "the country along the longest border of {entity}",
    "the state with which {entity} has its longest land border",
)
ASK_NEIGHBOUR: Templates = (
    "Which neighbour has the longest border with {entity}?",
    "Who shares the most border with {entity}?",
    "With whom does {entity} have its longest frontier?",
    "The longest land border of {entity} is with which country?",
    "On the other side of the longest border of {entity} lies what country?",
)
ASK_COUNT: Templates = (
    "How many neighbours does {entity} have?",
    "How many countries does {entity} touch?",
    "What's the number of states next to {entity}?",
    "{entity} has land borders with how many others?",
    "How many states could I enter on foot straight from {entity}?",
)
"""Templates of questions that ask how many countries border an entity."""

ASK_DENSITY: Templates = (
    "How many people are there for each sq km of {entity}, to two decimals?",
    "How crowded is {entity}, in people per sq km with two decimals?",
    "What's the population density of {entity} to two decimals?",
    "Spread evenly, how many people would share one sq km of {entity}, to two decimals?",
)

COMPARE: Mapping[str, Mapping[str, Templates]] = {
    "area": {
        "largest": (
            "Which is larger, {a} or {b}?",
            "Does {a} or {b} cover more land?",
            "Is {a} bigger than {b}, or is {b} the bigger one?",
            "Who has the greater area: {a} or {b}?",
            "{a} or {b}: which one takes up more space?",
        ),
        "smallest": (
            "Which is smaller, {a} or {b}?",
            "Who has less territory, {a} or {b}?",
            "Is {a} or {b} the smaller country by area?",
        ),
    },
    "population": {
        "largest": (
            "Which has more people, {a} or {b}?",
            "Are there more inhabitants in {a} or in {b}?",
            "{a} and {b}: in which of them do more people live?",
            "Who is more populous: {a} or {b}?",
        ),
        "smallest": (
            "Which has fewer people, {a} or {b}?",
            "Do fewer people live in {a} or in {b}?",
            "Who is less populous: {a} or {b}?",
        ),
    },
    "coastline": {
        "largest": (
            "Has {a} or {b} more coast?",
            "Whose shore is longer, that of {a} or that of {b}?",
            "Is there more seaside in {a} or in {b}?",
        ),
    },
    "highest_elevation": {
        "largest": (
            "Does {a} or {b} rise higher?",
            "Whose tallest peak is higher, that of {a} or that of {b}?",
            "Can I get farther above the sea in {a} or in {b}?",
        ),
    },
    "life_expectancy": {
        "largest": (
            "Do people live longer in {a} or in {b}?",
            "Where is life expectancy higher, in {a} or in {b}?",
            "Who can expect more years of life, people in {a} or people in {b}?",
        ),
    },
    "median_age": {
        "smallest": (
            "Are people younger in {a} or in {b}, by median age?",
            "Which has the lower median age, {a} or {b}?",
            "Who has the younger population, {a} or {b}?",
        ),
    },
    "airports": {
        "largest": (
            "Are there more airports in {a} or in {b}?",
            "Which has more airports, {a} or {b}?",
            "Who can offer pilots more airfields, {a} or {b}?",
        ),
    },
    "railways": {
        "largest": (
            "Has {a} or {b} more railways?",
            "Whose rail network is longer, that of {a} or that of {b}?",
            "Is there more track in {a} or in {b}?",
        ),
    },
}
"""Relation -> ``largest`` or ``smallest`` -> templates of questions that compare two entities."""

COMPARE_THREE: Mapping[str, Mapping[str, Templates]] = {
    "area": {
        "largest": (
            "Which is the largest of {a}, {b} and {c}?",
            "Who covers the most land: {a}, {b} or {c}?",
            "Of the three countries {a}, {b} and {c}, which is biggest?",
        ),
    },
    "population": {
        "largest": (
            "Which has the most people: {a}, {b} or {c}?",
            "Among {a}, {b} and {c}, who has the most inhabitants?",
            "Where do most people live, in {a}, in {b} or in {c}?",
        ),
    },
}
"""Relation -> ``largest`` -> templates of questions that compare three entities."""

ARITHMETIC: Mapping[str, Mapping[str, Templates]] = {
    "area": {
        "sum": (
            "How large are {a} and {b} together?",
            "What area do {a} and {b} cover as a whole?",
            "If {a} and {b} became one country, how many sq km would it have?",
        ),
        "difference": (
            "How many sq km does {a} have more than {b}?",
            "By how many sq km is {a} bigger than {b}?",
            "How much more land than {b} does {a} cover, in sq km?",
        ),
        "ratio": (
            "How many times the size of {b} is {a}, to two decimals?",
            "{b} would fit how many times into {a}, to two decimals?",
            "How many countries of the size of {b} make one {a}, to two decimals?",
        ),
    },
    "population": {
        "sum": (
            "How many people do {a} and {b} have together?",
            "What is the joint population of {a} and {b}?",
            "Put in one country, how many people would {a} and {b} be?",
        ),
        "difference": (
            "How many more people live in {a} than in {b}?",
            "By how many inhabitants does {a} exceed {b}?",
            "How many people does {b} lack to be as populous as {a}?",
        ),
        "ratio": (
            "How many times as many people as {b} does {a} have, to two decimals?",
            "For each inhabitant of {b}, how many has {a}, to two decimals?",
            "By which factor is {a} more populous than {b}, to two decimals?",
        ),
    },
    "coastline": {
        "sum": (
            "How many km of coast do {a} and {b} have together?",
            "What do the coasts of {a} and {b} add up to, in km?",
            "How long is a walk along the coasts of both {a} and {b}, in km?",
        ),
        "difference": (
            "How many km longer is the coast of {a} than that of {b}?",
            "How much more coast than {b} has {a} got, in km?",
            "By how many km does the shore of {a} exceed that of {b}?",
        ),
        "ratio": (
            "How many times as long as the coast of {b} is that of {a}, to two decimals?",
            "By which factor is the shore of {a} longer than that of {b}, to two decimals?",
            "Divide the coast of {a} by that of {b}, to two decimals: what comes out?",
        ),
    },
    "railways": {
        "sum": (
            "How many km of railway do {a} and {b} have together?",
            "What do the rail networks of {a} and {b} add up to, in km?",
            "How much track is there in {a} and {b} taken together, in km?",
        ),
        "difference": (
            "How many more km of railway than {b} does {a} have?",
            "By how many km is the rail network of {a} longer than that of {b}?",
            "How much track does {b} lack to match {a}, in km?",
        ),
        "ratio": (
            "How many times as long as the railways of {b} are those of {a}, to two decimals?",
            "By which factor is the rail network of {a} longer than that of {b}, to two decimals?",
            "Divide the railways of {a} by those of {b}, to two decimals: what comes out?",
        ),
    },
}
"""Relation -> operation -> templates of questions for arithmetic on the values of two entities."""


def known(templates: Templates) -> Templates:
    """Returns the templates that training questions use."""
    return templates[: len(templates) - max(1, len(templates) // 4)]


def held_out(templates: Templates) -> Templates:
    """Returns the templates that no training question uses."""
    return templates[len(known(templates)) :]
